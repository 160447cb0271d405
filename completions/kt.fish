# fish completion for kt; made by: kt completion fish
complete -c kt -f
complete -c kt -n __fish_use_subcommand -a chat -d 'Talk to a model'
complete -c kt -n '__fish_seen_subcommand_from chat' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from chat' -l greedy -d 'Always choose the most likely token'
complete -c kt -n '__fish_seen_subcommand_from chat' -l max-tokens -d 'Longest answer, in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l system -d 'System text' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l stop -d 'Text that stops the answer; the option may be repeated' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l temperature -d 'Randomness of answers; 0 is greedy' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l top-k -d 'Sample from the K most likely tokens only' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l top-p -d 'Sample from the most likely tokens up to total probability P' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l min-p -d 'Leave out tokens less likely than P times the most likely one' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l repetition-penalty -d 'Values above 1 discourage repetition; 1 is off' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l seed -d 'Seed of the sampling; the same seed gives the same text' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l think -d 'Whether the model thinks before answering, if this is optional'
complete -c kt -n '__fish_seen_subcommand_from chat' -l no-think -d 'Whether the model thinks before answering, if this is optional'
complete -c kt -n '__fish_seen_subcommand_from chat' -l think-budget -d 'Maximum number of thinking tokens per answer; after that, the model must answer' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l hide-thinking -d 'Hide the model’s thoughts entirely'
complete -c kt -n '__fish_seen_subcommand_from chat' -l continue -d 'Continue the last conversation'
complete -c kt -n '__fish_seen_subcommand_from chat' -l resume -d 'Continue a saved conversation (kt chats lists them)' -x -a '(kt names --chats 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from chat' -l allow-special -d 'Allow control tokens in text: <|im_end|> in a text then ends a turn'
complete -c kt -n '__fish_seen_subcommand_from chat' -l context -d 'Context length in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from chat' -l kv -d 'Number format of the KV cache. fp8 needs half the memory; models with sparse attention support only bf16' -x -a 'bf16 fp8'
complete -c kt -n '__fish_seen_subcommand_from chat' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from chat' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from chat' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from chat' -l placement -d 'File with rules that say where parts of the model go; what no rule names is the plan’s' -r -F
complete -c kt -n '__fish_seen_subcommand_from chat' -l defer -d 'Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l prefill-threshold -d 'Prompt length from which experts are streamed through the GPU, in tokens' -x -a 'never'
complete -c kt -n '__fish_seen_subcommand_from chat' -l draft -d 'Draft up to N tokens from repeated text and check them in one step. lookup: as many as pay off; answers stay the same' -x -a 'off lookup'
complete -c kt -n '__fish_seen_subcommand_from chat' -l no-kv-cache -d 'Do not read or write KV pages on disk or in a shared folder'
complete -c kt -n '__fish_seen_subcommand_from chat' -l kv-store -d 'Where several servers share KV pages: a folder, such as one on NFS, or mooncake://HOST:PORT' -x -a 'STORE off'
complete -c kt -n '__fish_seen_subcommand_from chat' -l kv-store-size -d 'Maximum size of the KV pages that this library writes to the shared folder' -x
complete -c kt -n '__fish_seen_subcommand_from chat' -l insecure -d 'Use a Mooncake store on an address that is not of a private network, although it has no authentication'
complete -c kt -n '__fish_seen_subcommand_from chat' -l attach -d 'Whether a chat uses a running server of this library. loaded: only if the server has the model loaded; always: the server loads the model if necessary; never: the model is loaded here' -x -a 'loaded always never'
complete -c kt -n '__fish_seen_subcommand_from chat' -l no-attach -d 'Load the model here: the same as --attach never'
complete -c kt -n '__fish_seen_subcommand_from chat' -l server -d 'Chat with a model of the server at this address, which speaks OpenAI’s API: kt serve, a router, vLLM, SGLang, llama-server. off: no server' -x -a 'URL off'
complete -c kt -n '__fish_seen_subcommand_from chat' -l server-key-file -d 'File with the API key of that server; only its owner may read it' -r -F
complete -c kt -n '__fish_seen_subcommand_from chat' -l stats -d 'Show token counts and rates (on stderr)'
complete -c kt -n '__fish_seen_subcommand_from chat' -l explain-cache -d 'If cached tokens could not be used, say from which token on and why'
complete -c kt -n '__fish_seen_subcommand_from chat' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chat' -l jsonl -d 'Print the answer as lines of JSON while it is written'
complete -c kt -n '__fish_seen_subcommand_from chat' -l output -d 'Also write the answer’s text to a new file' -r -F
complete -c kt -n '__fish_seen_subcommand_from chat' -l schema -d 'Constrain answers to the JSON schema in FILE' -r -F
complete -c kt -n '__fish_seen_subcommand_from chat' -l format -d 'Constrain answers to a JSON object' -x -a 'json'
complete -c kt -n '__fish_seen_subcommand_from chat' -l yes -d 'Pull the model without asking if it is missing'
complete -c kt -n '__fish_seen_subcommand_from chat' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chat' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a serve -d 'Serve a model to programs that speak OpenAI’s, Anthropic’s or Ollama’s API'
complete -c kt -n '__fish_seen_subcommand_from serve' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from serve' -l host -d 'Address to listen on; one that other machines can reach needs an API key' -x -a 'ADDRESS'
complete -c kt -n '__fish_seen_subcommand_from serve' -l port -d 'Port to listen on' -x -a 'PORT'
complete -c kt -n '__fish_seen_subcommand_from serve' -l ollama -d 'Also listen on Ollama’s port 11434, for its clients'
complete -c kt -n '__fish_seen_subcommand_from serve' -l api-key -d 'API key that clients must send' -x -a 'KEY'
complete -c kt -n '__fish_seen_subcommand_from serve' -l api-key-file -d 'File with the API key that clients must send, or several as lines name:key; only its owner may read it' -r -F
complete -c kt -n '__fish_seen_subcommand_from serve' -l allow-origin -d 'Allow web pages of this origin (https://chat.example.com); may be repeated. * allows all and needs an API key' -x -a 'ORIGIN'
complete -c kt -n '__fish_seen_subcommand_from serve' -l allow-host -d 'Allow requests to this host name, such as behind a proxy; may be repeated. * allows every name and needs an API key' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l root-path -d 'Path under which a proxy publishes the server, such as /kt; the proxy may forward it or strip it' -x -a 'PATH'
complete -c kt -n '__fish_seen_subcommand_from serve' -l parallel -d 'Conversations to answer at the same time, each with the full context' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l max-pause -d 'Longest pause of running answers while a new prompt is read; a shorter one makes prompts take longer' -x -a 'SECONDS'
complete -c kt -n '__fish_seen_subcommand_from serve' -l model-alias -d 'Another name for the model; may be repeated' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l adapter -d 'Also serve the model with this adapter from the library, as MODEL+ADAPTER; may be repeated' -x -a 'ADAPTER'
complete -c kt -n '__fish_seen_subcommand_from serve' -l strict-model -d 'Refuse requests for other models instead of answering them with this one'
complete -c kt -n '__fish_seen_subcommand_from serve' -l keep-alive -d 'How long an unused model stays in memory: 5m, 1h30m, 300 (seconds), 0, or -1 forever' -x -a 'TIME'
complete -c kt -n '__fish_seen_subcommand_from serve' -l kv-store -d 'Where several servers share KV pages: a folder, such as one on NFS, or mooncake://HOST:PORT' -x -a 'STORE off'
complete -c kt -n '__fish_seen_subcommand_from serve' -l kv-store-size -d 'Maximum size of the KV pages that this library writes to the shared folder' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l insecure -d 'Use a Mooncake store on an address that is not of a private network, although it has no authentication'
complete -c kt -n '__fish_seen_subcommand_from serve' -l kv-events -d 'Address for events that tell routers which KV pages the server has, such as tcp://127.0.0.1:5557' -x -a 'ADDRESS off'
complete -c kt -n '__fish_seen_subcommand_from serve' -l drain -d 'How long answers may take to finish when the server is stopped' -x -a 'SECONDS'
complete -c kt -n '__fish_seen_subcommand_from serve' -l log-json -d 'Write one line of JSON per request to stderr'
complete -c kt -n '__fish_seen_subcommand_from serve' -l record-trace -d 'Append a line for each request to this file, for kt bench cache: times, lengths and keyed hashes of the prompt’s blocks, no text' -r -F
complete -c kt -n '__fish_seen_subcommand_from serve' -l background -d 'Return once the server is ready; it keeps running without the terminal'
complete -c kt -n '__fish_seen_subcommand_from serve' -l print-unit -d 'Print a systemd unit for this server, and do nothing else'
complete -c kt -n '__fish_seen_subcommand_from serve' -l engine -d 'Program that computes: kt itself, or SGLang with kt-kernel (kt engine install sglang-kt)' -x -a 'kt sglang-kt'
complete -c kt -n '__fish_seen_subcommand_from serve' -l method -d 'With --engine sglang-kt: kt-kernel’s method for experts on the CPU' -x -a 'METHOD'
complete -c kt -n '__fish_seen_subcommand_from serve' -l expert-weights -d 'With --engine sglang-kt: experts converted by kt-kernel itself, for the methods AMXINT4 and AMXINT8' -x -a 'FOLDER'
complete -c kt -n '__fish_seen_subcommand_from serve' -l trust-remote-code -d 'With --engine sglang-kt: allow Python code of the model’s repository to run'
complete -c kt -n '__fish_seen_subcommand_from serve' -l dry-run -d 'With --engine sglang-kt: print its command line, and start nothing'
complete -c kt -n '__fish_seen_subcommand_from serve' -l machine -d 'Plan for a machine that ships with kt, or for one described by a file or in words: ’cpu=2x8452Y ram=512G gpu=4090’' -r -a 'cloud-h200-128gb desktop-24gb-gpu laptop-16gb laptop-8gb-gpu server-8xl20-1tb workstation-2x4090 workstation-4090-512gb xeon-2x32-512gb xeon-2x36-2x4090-1tb xeon-2x36-4090-512gb WORDS' -F
complete -c kt -n '__fish_seen_subcommand_from serve' -l context -d 'Context length in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from serve' -l kv -d 'Number format of the KV cache. fp8 needs half the memory; models with sparse attention support only bf16' -x -a 'bf16 fp8'
complete -c kt -n '__fish_seen_subcommand_from serve' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from serve' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from serve' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from serve' -l placement -d 'File with rules that say where parts of the model go; what no rule names is the plan’s' -r -F
complete -c kt -n '__fish_seen_subcommand_from serve' -l defer -d 'Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off' -x
complete -c kt -n '__fish_seen_subcommand_from serve' -l prefill-threshold -d 'Prompt length from which experts are streamed through the GPU, in tokens' -x -a 'never'
complete -c kt -n '__fish_seen_subcommand_from serve' -l yes -d 'Pull the model without asking if it is missing'
complete -c kt -n '__fish_seen_subcommand_from serve' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from serve' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from serve' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a route -d 'Route requests to several servers, by what each has in its cache'
complete -c kt -n '__fish_seen_subcommand_from route' -a 'URL'
complete -c kt -n '__fish_seen_subcommand_from route' -l host -d 'Address to listen on; one that other machines can reach needs --api-key-file' -x -a 'ADDRESS'
complete -c kt -n '__fish_seen_subcommand_from route' -l port -d 'Port to listen on' -x -a 'PORT'
complete -c kt -n '__fish_seen_subcommand_from route' -l metrics-port -d 'Port of the router’s own counters, on 127.0.0.1 only' -x -a 'PORT'
complete -c kt -n '__fish_seen_subcommand_from route' -l model -d 'Model that the servers have in common' -x
complete -c kt -n '__fish_seen_subcommand_from route' -l api-key-file -d 'File with the API key that clients must send, or several as lines name:key; only its owner may read it' -r -F
complete -c kt -n '__fish_seen_subcommand_from route' -l control-key-file -d 'File with the key for adding servers through the router’s own API; only its owner may read it' -r -F
complete -c kt -n '__fish_seen_subcommand_from route' -l drain -d 'How long answers may take to finish when the router is stopped' -x -a 'SECONDS'
complete -c kt -n '__fish_seen_subcommand_from route' -l add -d 'Add a server to the running router' -x -a 'URL'
complete -c kt -n '__fish_seen_subcommand_from route' -l remove -d 'Remove a server from the running router, once its answers have finished' -x -a 'URL'
complete -c kt -n '__fish_seen_subcommand_from route' -l background -d 'Return once the router is ready; it keeps running without the terminal'
complete -c kt -n '__fish_seen_subcommand_from route' -l print-unit -d 'Print a systemd unit for this router, and do nothing else'
complete -c kt -n '__fish_seen_subcommand_from route' -l dry-run -d 'Ask the servers, print the router’s command line, and start nothing'
complete -c kt -n '__fish_seen_subcommand_from route' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from route' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from route' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a store -d 'Run a KV store for several servers'
complete -c kt -n '__fish_seen_subcommand_from store' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from store' -a serve -d 'Run a Mooncake store, in which servers share KV pages'
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l host -d 'Address for the store’s master' -x -a 'ADDRESS'
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l port -d 'Port for the master' -x -a 'PORT'
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l memory -d 'Memory that this machine lends' -x
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l join -d 'Lend memory to the store of this master, instead of starting one' -x
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l insecure -d 'Use a Mooncake store on an address that is not of a private network, although it has no authentication'
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from store; and __fish_seen_subcommand_from serve' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a ps -d 'List the running servers of this library'
complete -c kt -n '__fish_seen_subcommand_from ps' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from ps' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from ps' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a stop -d 'Stop servers of this library'
complete -c kt -n '__fish_seen_subcommand_from stop' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from stop' -l all -d 'Stop every server of this library'
complete -c kt -n '__fish_seen_subcommand_from stop' -l drain -d 'How long answers may take to finish' -x -a 'SECONDS'
complete -c kt -n '__fish_seen_subcommand_from stop' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from stop' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from stop' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a doctor -d 'Show what this machine is and can do'
complete -c kt -n '__fish_seen_subcommand_from doctor' -l measure -d 'Also measure bandwidth and arithmetic, and remember the result'
complete -c kt -n '__fish_seen_subcommand_from doctor' -l verbose -d 'Also show kernels, threads, caches and notes'
complete -c kt -n '__fish_seen_subcommand_from doctor' -l record -d 'Write a description of this machine to a file, for kt plan --machine FILE' -r -F
complete -c kt -n '__fish_seen_subcommand_from doctor' -l report -d 'Write a file for a bug report, without names, paths or tokens' -r -F
complete -c kt -n '__fish_seen_subcommand_from doctor' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from doctor' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a plan -d 'Show which models run here, or where one model goes and how fast it is'
complete -c kt -n '__fish_seen_subcommand_from plan' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from plan' -l context -d 'Context length in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from plan' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from plan' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from plan' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from plan' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from plan' -l kv -d 'Number format of the KV cache. fp8 needs half the memory; models with sparse attention support only bf16' -x -a 'bf16 fp8'
complete -c kt -n '__fish_seen_subcommand_from plan' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from plan' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from plan' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from plan' -l placement -d 'File with rules that say where parts of the model go; what no rule names is the plan’s' -r -F
complete -c kt -n '__fish_seen_subcommand_from plan' -l defer -d 'Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off' -x
complete -c kt -n '__fish_seen_subcommand_from plan' -l prefill-threshold -d 'Prompt length from which experts are streamed through the GPU, in tokens' -x -a 'never'
complete -c kt -n '__fish_seen_subcommand_from plan' -l want -d 'Tokens per second that you want; kt suggests how to reach this speed' -x -a 'TOK_S'
complete -c kt -n '__fish_seen_subcommand_from plan' -l machine -d 'Plan for a machine that ships with kt, or for one described by a file or in words: ’cpu=2x8452Y ram=512G gpu=4090’' -r -a 'cloud-h200-128gb desktop-24gb-gpu laptop-16gb laptop-8gb-gpu server-8xl20-1tb workstation-2x4090 workstation-4090-512gb xeon-2x32-512gb xeon-2x36-2x4090-1tb xeon-2x36-4090-512gb WORDS' -F
complete -c kt -n '__fish_seen_subcommand_from plan' -l write-placement -d 'Write where the parts go as rules for --placement' -r -F
complete -c kt -n '__fish_seen_subcommand_from plan' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from plan' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a search -d 'Find models by name, in the catalogue and on the hubs'
complete -c kt -n '__fish_seen_subcommand_from search'
complete -c kt -n '__fish_seen_subcommand_from search' -l hub -d 'Also ask Hugging Face and ModelScope'
complete -c kt -n '__fish_seen_subcommand_from search' -l from -d 'Use only this hub' -x -a 'hf modelscope'
complete -c kt -n '__fish_seen_subcommand_from search' -l limit -d 'Maximum number of results per hub' -x
complete -c kt -n '__fish_seen_subcommand_from search' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from search' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from search' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a pull -d 'Download a model into the library'
complete -c kt -n '__fish_seen_subcommand_from pull' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from pull' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from pull' -l limit -d 'Maximum download rate, in bytes per second; 0 means no limit' -x
complete -c kt -n '__fish_seen_subcommand_from pull' -l as -d 'Also give it this name' -x
complete -c kt -n '__fish_seen_subcommand_from pull' -l from -d 'Use only this hub' -x -a 'hf modelscope'
complete -c kt -n '__fish_seen_subcommand_from pull' -l stream -d 'Convert during the download, and do not keep the checkpoint'
complete -c kt -n '__fish_seen_subcommand_from pull' -l no-stream -d 'Convert during the download, and do not keep the checkpoint'
complete -c kt -n '__fish_seen_subcommand_from pull' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from pull' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from pull' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a convert -d 'Convert a checkpoint into the files that kt runs'
complete -c kt -n '__fish_seen_subcommand_from convert' -a '(kt names --here 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from convert' -l out -d 'Output folder' -x -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from convert' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from convert' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from convert' -l mixed -d 'Use the next more precise format for the experts’ down projections'
complete -c kt -n '__fish_seen_subcommand_from convert' -l calibrate -d 'Make formats of 4 and 6 bits most precise where activations are large, as a text (a file or the built-in one), an importance file or an imatrix in GGUF tells' -r -a 'auto built-in off' -F
complete -c kt -n '__fish_seen_subcommand_from convert' -l adapter -d 'Merge this adapter into the weights: a name of kt adapter list, or a folder' -x -a 'ADAPTER'
complete -c kt -n '__fish_seen_subcommand_from convert' -l as -d 'Name of the merged model' -x
complete -c kt -n '__fish_seen_subcommand_from convert' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from convert' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from convert' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from convert' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a list -d 'List the models in the library'
complete -c kt -n '__fish_seen_subcommand_from list' -l all -d 'Also list models that kt knows but that are not on disk'
complete -c kt -n '__fish_seen_subcommand_from list' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from list' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from list' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a alias -d 'Give a model a name of your own, or list these names'
complete -c kt -n '__fish_seen_subcommand_from alias' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from alias' -l file -d 'Read model and preset from an Ollama Modelfile' -r -F
complete -c kt -n '__fish_seen_subcommand_from alias' -l system -d 'System text' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l temperature -d 'Randomness of answers; 0 is greedy' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l top-k -d 'Sample from the K most likely tokens only' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l top-p -d 'Sample from the most likely tokens up to total probability P' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l min-p -d 'Leave out tokens less likely than P times the most likely one' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l repetition-penalty -d 'Values above 1 discourage repetition; 1 is off' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l seed -d 'Seed of the sampling; the same seed gives the same text' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l stop -d 'Text that stops the answer; the option may be repeated' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l max-tokens -d 'Longest answer, in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l think -d 'Whether the model thinks before answering, if this is optional'
complete -c kt -n '__fish_seen_subcommand_from alias' -l no-think -d 'Whether the model thinks before answering, if this is optional'
complete -c kt -n '__fish_seen_subcommand_from alias' -l think-budget -d 'Maximum number of thinking tokens per answer; after that, the model must answer' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l context -d 'Context length in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from alias' -l rm -d 'Remove the alias, not the model'
complete -c kt -n '__fish_seen_subcommand_from alias' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from alias' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from alias' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a show -d 'Show what a model is and what it needs'
complete -c kt -n '__fish_seen_subcommand_from show' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from show' -l experts -d 'Show a chart of how often each expert was chosen in chats'
complete -c kt -n '__fish_seen_subcommand_from show' -l program -d 'Show the operations of a step, one line each'
complete -c kt -n '__fish_seen_subcommand_from show' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from show' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a verify -d 'Check a model’s files against their hashes'
complete -c kt -n '__fish_seen_subcommand_from verify' -a '(kt names --here 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from verify' -l all -d 'Check everything in the library that is complete'
complete -c kt -n '__fish_seen_subcommand_from verify' -l repair -d 'Restore damaged files, and only these'
complete -c kt -n '__fish_seen_subcommand_from verify' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from verify' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from verify' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a rm -d 'Remove a model and free its space'
complete -c kt -n '__fish_seen_subcommand_from rm' -a '(kt names --mine 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from rm' -l partial -d 'Also remove everything whose pull or conversion was interrupted'
complete -c kt -n '__fish_seen_subcommand_from rm' -l checkpoint-only -d 'Remove only the files that were pulled; conversions stay'
complete -c kt -n '__fish_seen_subcommand_from rm' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from rm' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from rm' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from rm' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a prune -d 'Remove what interrupted work left behind'
complete -c kt -n '__fish_seen_subcommand_from prune' -l checkpoints -d 'Also remove checkpoints of models that have a complete conversion'
complete -c kt -n '__fish_seen_subcommand_from prune' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from prune' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from prune' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from prune' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a du -d 'Show how much disk space each model takes'
complete -c kt -n '__fish_seen_subcommand_from du' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from du' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from du' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a path -d 'Print the folder of a model, or of the library'
complete -c kt -n '__fish_seen_subcommand_from path' -a '(kt names --here 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from path' -l checkpoint -d 'The checkpoint, even if the model is converted'
complete -c kt -n '__fish_seen_subcommand_from path' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from path' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a export -d 'Write a model to a file, for machines without a network'
complete -c kt -n '__fish_seen_subcommand_from export' -a '(kt names --here 2>/dev/null)' -F
complete -c kt -n '__fish_seen_subcommand_from export' -l checkpoint -d 'The checkpoint, even if the model is converted'
complete -c kt -n '__fish_seen_subcommand_from export' -l all -d 'The checkpoint and all conversions'
complete -c kt -n '__fish_seen_subcommand_from export' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from export' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from export' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a import -d 'Import a model from a file written by kt export'
complete -c kt -n '__fish_seen_subcommand_from import' -F
complete -c kt -n '__fish_seen_subcommand_from import' -l as -d 'Name of the model in this library' -x
complete -c kt -n '__fish_seen_subcommand_from import' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from import' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from import' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a adapter -d 'Import LoRA adapters, list, check and convert them'
complete -c kt -n '__fish_seen_subcommand_from adapter' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from adapter' -a import -d 'Copy an adapter into the library'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from import' -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from import' -l as -d 'Name in the library' -x
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from import' -l base -d 'Model that the adapter changes' -x -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from import' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from import' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from import' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from adapter' -a list -d 'List the adapters in the library'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from list' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from list' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from list' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from adapter' -a show -d 'Show what an adapter changes, and by how much'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from show' -a 'ADAPTER'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from show' -l base -d 'Model that the adapter changes' -x -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from show' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from show' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from show' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from adapter' -a export -d 'Write an adapter in the layout that another program reads'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from export' -a 'ADAPTER'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from export' -l layout -d 'One of peft, per-expert, kt-kernel' -x -a 'LAYOUT'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from export' -l base -d 'Model that the adapter changes' -x -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from export' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from export' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from export' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from adapter' -a verify -d 'Check the files of adapters against their hashes'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from verify' -a 'ADAPTER'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from verify' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from verify' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from verify' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from adapter' -a rm -d 'Remove adapters from the library'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from rm' -a 'ADAPTER'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from rm' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from rm' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from rm' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from adapter; and __fish_seen_subcommand_from rm' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a finetune -d 'Train an adapter on your data'
complete -c kt -n '__fish_seen_subcommand_from finetune' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l data -d 'Data file: .jsonl, .json or .csv' -r -F
complete -c kt -n '__fish_seen_subcommand_from finetune' -l as -d 'Name of the adapter in the library' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l epochs -d 'How many times the data is read' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l steps -d 'Optimizer steps, instead of epochs' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l rank -d 'Rank of the adapter' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l lr -d 'Highest learning rate' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l show -d 'Only show N samples, with what is trained marked' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l plan -d 'Only show what would be trained, and what it needs'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l machine -d 'Plan for a machine that ships with kt, or for one described by a file or in words: ’cpu=2x8452Y ram=512G gpu=4090’' -r -a 'cloud-h200-128gb desktop-24gb-gpu laptop-16gb laptop-8gb-gpu server-8xl20-1tb workstation-2x4090 workstation-4090-512gb xeon-2x32-512gb xeon-2x36-2x4090-1tb xeon-2x36-4090-512gb WORDS' -F
complete -c kt -n '__fish_seen_subcommand_from finetune' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from finetune' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l yes -d 'Pull the model without asking if it is missing'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from finetune' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a placement -d 'Translate placements of other programs into rules for --placement'
complete -c kt -n '__fish_seen_subcommand_from placement' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from placement' -a import -d 'Translate another program’s placement into rules, and list what means no place'
complete -c kt -n '__fish_seen_subcommand_from placement; and __fish_seen_subcommand_from import' -F
complete -c kt -n '__fish_seen_subcommand_from placement; and __fish_seen_subcommand_from import' -l model -d 'Model that the rules are for' -x -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from placement; and __fish_seen_subcommand_from import' -l output -d 'Write the rules to this file' -r -F
complete -c kt -n '__fish_seen_subcommand_from placement; and __fish_seen_subcommand_from import' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from placement; and __fish_seen_subcommand_from import' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from placement; and __fish_seen_subcommand_from import' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a engine -d 'Install programs by others that kt starts, each in an environment of its own'
complete -c kt -n '__fish_seen_subcommand_from engine' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from engine' -a install -d 'Install a program into an environment of its own'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from install' -a 'ENGINE'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from install' -l from -d 'Take the packages from this folder, not the network' -x -a 'FOLDER'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from install' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from install' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from install' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from engine' -a list -d 'List the programs that kt can install, and those that are here'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from list' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from list' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from list' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from engine' -a rm -d 'Remove a program with its environment'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from rm' -a 'ENGINE'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from rm' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from rm' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from rm' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from engine; and __fish_seen_subcommand_from rm' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a cache -d 'Show, check and remove the KV pages on disk'
complete -c kt -n '__fish_seen_subcommand_from cache' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from cache' -a du -d 'Show how much disk space KV pages use, per model, and how much they may use'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from du' -l store -d 'The shared folder DIR (--kv-store of kt serve) instead of the library' -x -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from du' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from du' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from du' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from cache' -a ls -d 'List the models that have KV pages, most recently used first'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from ls' -l store -d 'The shared folder DIR (--kv-store of kt serve) instead of the library' -x -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from ls' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from ls' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from ls' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from cache' -a verify -d 'Check every KV page against its checksum, and remove damaged files'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from verify' -l store -d 'The shared folder DIR (--kv-store of kt serve) instead of the library' -x -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from verify' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from verify' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from verify' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from cache' -a rm -d 'Remove KV pages and free their space; conversations stay, and are read again when continued'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from rm' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from rm' -l store -d 'The shared folder DIR (--kv-store of kt serve) instead of the library' -x -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from rm' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from rm' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from rm' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from cache; and __fish_seen_subcommand_from rm' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a chats -d 'List saved conversations, and change them'
complete -c kt -n '__fish_seen_subcommand_from chats' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chats' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chats' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from chats' -a show -d 'Show the messages of a conversation'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from show' -a '(kt names --chats 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from show' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from show' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from show' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from chats' -a search -d 'List the conversations that contain all of the words, yours or the model’s'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from search'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from search' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from search' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from search' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from chats' -a rm -d 'Remove conversations'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rm' -a '(kt names --chats 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rm' -l yes -d 'Do not ask'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rm' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rm' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rm' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from chats' -a export -d 'Print a conversation as a document'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from export' -a '(kt names --chats 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from export' -l format -d 'Markdown, or JSON that /load reads' -x -a 'md json'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from export' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from export' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from export' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from chats' -a rename -d 'Rename a conversation'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rename' -a '(kt names --chats 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rename' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rename' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from chats; and __fish_seen_subcommand_from rename' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a bench -d 'Measure speed, even of models that are not downloaded'
complete -c kt -n '__fish_seen_subcommand_from bench' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a decode -d 'Measure the speed of an answer, in tokens per second'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l layers -d 'Number of decoder layers' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l tokens -d 'Tokens per run' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l context -d 'Tokens in the cache before each run' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l batch -d 'Number of answers written at the same time; one result row for each number' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l kv -d 'Number format of the KV cache. fp8 needs half the memory; models with sparse attention support only bf16' -x -a 'bf16 fp8'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l placement -d 'File with rules that say where parts of the model go; what no rule names is the plan’s' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l defer -d 'Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l prefill-threshold -d 'Prompt length from which experts are streamed through the GPU, in tokens' -x -a 'never'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l policy -d 'With a GPU: how the CPU and GPU share the experts, in kt’s way or another program’s' -x -a 'kt all-cpu gpu-stream fiddler'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l runs -d 'Number of runs, each between two measurements of the ceiling' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l profile -d 'Also show where the time goes, by kind of operation'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l trace -d 'Also write a timeline of one step, for Perfetto or chrome://tracing' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from decode' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a prefill -d 'Measure the speed of reading a prompt, in tokens per second'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l layers -d 'Number of decoder layers' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l tokens -d 'Tokens per run' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l context -d 'Tokens in the cache before each run' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l kv -d 'Number format of the KV cache. fp8 needs half the memory; models with sparse attention support only bf16' -x -a 'bf16 fp8'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l placement -d 'File with rules that say where parts of the model go; what no rule names is the plan’s' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l defer -d 'Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l prefill-threshold -d 'Prompt length from which experts are streamed through the GPU, in tokens' -x -a 'never'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l policy -d 'With a GPU: how the CPU and GPU share the experts, in kt’s way or another program’s' -x -a 'kt all-cpu gpu-stream fiddler'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l runs -d 'Number of runs, each between two measurements of the ceiling' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l profile -d 'Also show where the time goes, by kind of operation'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from prefill' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a resume -d 'Measure how fast a conversation resumes from KV pages on disk'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l layers -d 'Number of decoder layers' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l tokens -d 'Length of the conversation so far, in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l runs -d 'Number of runs with warm files, and again with cold files' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from resume' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a kernel -d 'Measure the experts of one layer, and dense matrix products'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l work -d 'What to measure; may be repeated' -x -a 'decode prefill linear'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l shape -d 'Hidden size, expert width, number of experts, experts per token; may be repeated' -x -a 'A B C'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l format -d 'Number format; may be repeated' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l tokens -d 'Tokens per expert in a prefill; may be repeated' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l isa -d 'Kernel row, as in KT_ISA' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l runs -d 'Number of runs, each between two measurements of the ceiling' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from kernel' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a finetune -d 'Measure a step of LoRA fine-tuning, forward and backward of each layer'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l layers -d 'Number of decoder layers' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l tokens -d 'Tokens per optimizer step, rounded up to whole documents' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l length -d 'Tokens per document' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l rank -d 'Rank of the adapter' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l runs -d 'Number of runs, each between two measurements of the ceiling' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from finetune' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a mixed -d 'Measure answers and a long prompt that run at the same time'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l layers -d 'Number of decoder layers' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l streams -d 'Number of answers in progress' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l tokens -d 'Length of the prompt, in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l experts -d 'Number format of the routed experts, e.g. int4, int8, bf16; or auto (convert, plan)' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l dense -d 'Number format of the dense weights, e.g. int8, bf16' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l device -d 'Where attention and dense parts run' -x -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l gpus -d 'GPUs that may be used, by number, such as 0,1' -x -a 'all'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l placement -d 'File with rules that say where parts of the model go; what no rule names is the plan’s' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l defer -d 'Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l prefill-threshold -d 'Prompt length from which experts are streamed through the GPU, in tokens' -x -a 'never'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from mixed' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a serve -d 'Measure a server that speaks OpenAI’s API under load'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l url -d 'Address of the server, with or without /v1' -x -a 'URL'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l model -d 'Model to request' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l num-prompts -d 'Requests to send' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l request-rate -d 'Requests per second, at random times (Poisson)' -x -a 'R'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l max-concurrency -d 'Maximum number of concurrent requests' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l input-len -d 'Length of each prompt, in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l output-len -d 'Length of each answer, in tokens' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l seed -d 'Seed of the words and times' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l api-key -d 'API key to send' -x -a 'KEY'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l api-key-file -d 'File with the API key to send; it must be readable only by you' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l output-file -d 'Also write one line of JSON per request to this file' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l plot -d 'Also draw the result as an SVG file' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from serve' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from bench' -a cache -d 'Replay recorded requests: is a second server needed, a larger cache, or only a router?'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l trace -d 'Trace of requests, as kt serve --record-trace and Mooncake write it' -r -F
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l memory -d 'Sizes of each server’s cache in memory: 16G, 500ktokens, unlimited' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l disk -d 'Sizes of its cache on disk' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l servers -d 'Numbers of servers' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l routing -d 'Rules by which a router chooses a server: round-robin, least-loaded, prefix' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l spill -d 'With prefix routing: requests by which a server may have more than another before load decides' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l speed -d 'Tokens of prompts that a server computes in a second' -x -a 'TOK_S'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l decode-speed -d 'Tokens that it writes in a second, of all answers together' -x -a 'TOK_S'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l bytes-per-token -d 'Bytes of a token in the cache' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l max-wait -d 'Longest wait for the first token that 95 % of the requests may have' -x -a 'SECONDS'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l stretch -d 'Replay the trace over X times its time: 10 for a tenth of its requests per second' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l block -d 'Tokens of a block of the trace' -x
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from cache' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a eval -d 'Measure how well a model predicts text and answers questions'
complete -c kt -n '__fish_seen_subcommand_from eval' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from eval' -l data -d 'Rows to predict, as kt finetune takes them: .jsonl, .json or .csv' -r -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l tasks -d 'Questions to answer; the last answer of each row is the right one' -r -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l max-tokens -d 'Maximum tokens per answer to --tasks' -x
complete -c kt -n '__fish_seen_subcommand_from eval' -l out -d 'File for the answers to --tasks, as JSON lines' -r -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l against -d 'Model or conversion to compare with, token by token' -x -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from eval' -l formats -d 'Conversions to compare, made if missing, e.g. bf16-bf16,int8,int4' -x -a 'int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32'
complete -c kt -n '__fish_seen_subcommand_from eval' -l defer -d 'Experts per token that finish one layer later, e.g. 0,3,6' -x
complete -c kt -n '__fish_seen_subcommand_from eval' -l kv -d 'Number format of the KV cache: bf16, f32, fp8, or several, e.g. bf16,fp8' -x -a 'bf16 f32 fp8'
complete -c kt -n '__fish_seen_subcommand_from eval' -l split -d 'Show what a conversion’s weights, activations and cache each cost, against the model in f32'
complete -c kt -n '__fish_seen_subcommand_from eval' -l text -d 'Plain text file to predict' -r -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l tokens -d 'Maximum number of tokens of the text' -x
complete -c kt -n '__fish_seen_subcommand_from eval' -l context -d 'Tokens per window; each window starts with an empty context' -x
complete -c kt -n '__fish_seen_subcommand_from eval' -l stride -d 'Tokens from one window to the next' -x
complete -c kt -n '__fish_seen_subcommand_from eval' -l plot -d 'Also draw the result as an SVG file' -r -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l allow-special -d 'Allow control tokens in text: <|im_end|> in a text then ends a turn'
complete -c kt -n '__fish_seen_subcommand_from eval' -l threads -d 'CPU threads' -x
complete -c kt -n '__fish_seen_subcommand_from eval' -l numa -d 'Split threads and weights across NUMA nodes' -x -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from eval' -l device -d 'Where models run' -x -a 'auto cpu'
complete -c kt -n '__fish_seen_subcommand_from eval' -l gpu-experts -d 'Experts on the GPU: a number per layer, a rule, or a file with one line of expert ids per layer' -r -a 'uniform front hot' -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l placement -d 'File with rules that say where parts of the model go' -r -F
complete -c kt -n '__fish_seen_subcommand_from eval' -l yes -d 'Pull the model without asking if it is missing'
complete -c kt -n '__fish_seen_subcommand_from eval' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from eval' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from eval' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a config -d 'Show and change the settings'
complete -c kt -n '__fish_seen_subcommand_from config' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from config' -a list -d 'List all settings, with their values and where they come from'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from list' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from list' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from list' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from config' -a get -d 'Show one setting: its value on standard output, its meaning and possible values on standard error'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from get' -a 'home libraries model system temperature top-k top-p min-p seed stop max-tokens think think-budget thoughts markdown status when-full attach server server-key-file context kv draft device gpus placement defer threads numa host port api-key-file parallel max-pause keep-alive heat cache kv-store kv-store-size kv-insecure kv-events pull-limit isa tile-min debug'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from get' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from get' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from get' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from config' -a set -d 'Change a setting for all commands from now on'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set' -a 'home libraries model system temperature top-k top-p min-p seed stop max-tokens think think-budget thoughts markdown status when-full attach server server-key-file context kv draft device gpus placement defer threads numa host port api-key-file parallel max-pause keep-alive heat cache kv-store kv-store-size kv-insecure kv-events pull-limit'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = home' -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = libraries' -a '(__fish_complete_directories)'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = model' -a '(kt names 2>/dev/null; __fish_complete_suffix .gguf)'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = think' -a 'on off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = thoughts' -a 'folded shown hidden'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = markdown' -a 'on off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = status' -a 'on off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = when-full' -a 'drop stop'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = attach' -a 'loaded always never'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = server' -a 'URL off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = server-key-file' -F
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = kv' -a 'bf16 fp8'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = draft' -a 'off lookup'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = device' -a 'auto cpu cuda (kt names --gpus 2>/dev/null)'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = gpus' -a 'all'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = placement' -F
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = numa' -a 'auto off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = host' -a 'ADDRESS'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = port' -a 'PORT'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = api-key-file' -F
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = max-pause' -a 'SECONDS'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = keep-alive' -a 'TIME'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = heat' -a 'on off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = kv-store' -a 'STORE off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = kv-insecure' -a 'on off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set; and test (commandline -opc)[-1] = kv-events' -a 'ADDRESS off'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from set' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from config' -a unset -d 'Reset a setting to its default'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from unset' -a 'home libraries model system temperature top-k top-p min-p seed stop max-tokens think think-budget thoughts markdown status when-full attach server server-key-file context kv draft device gpus placement defer threads numa host port api-key-file parallel max-pause keep-alive heat cache kv-store kv-store-size kv-insecure kv-events pull-limit'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from unset' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from unset' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from unset' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from config' -a edit -d 'Open the settings file in the editor that $VISUAL or $EDITOR names'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from edit' -l help -d 'Show this message and exit'
complete -c kt -n '__fish_seen_subcommand_from config' -a path -d 'Print the path of the settings file, whether or not it exists'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from path' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from path' -l quiet -d 'Print only results and errors'
complete -c kt -n '__fish_seen_subcommand_from config; and __fish_seen_subcommand_from path' -l help -d 'Show this message and exit'
complete -c kt -n __fish_use_subcommand -a completion -d 'Install shell completion of commands, options and names'
complete -c kt -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish install uninstall'
complete -c kt -n '__fish_seen_subcommand_from completion; and test (commandline -opc)[-1] = install' -a 'bash zsh fish'
complete -c kt -n '__fish_seen_subcommand_from completion; and test (commandline -opc)[-1] = uninstall' -a 'bash zsh fish'
complete -c kt -n '__fish_seen_subcommand_from completion' -l json -d 'Print one JSON document on stdout'
complete -c kt -n '__fish_seen_subcommand_from completion' -l help -d 'Show this message and exit'
