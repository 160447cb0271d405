# bash completion for kt; made by: kt completion bash
_kt() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]}
    local options='' words='' names='' files=''
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "chat serve route store ps stop doctor plan search pull convert list alias show verify rm prune du path export import adapter finetune placement engine cache chats bench eval config completion --help --version" -- "$word"))
        return
    fi
    case $verb in
        store|adapter|placement|engine|cache|chats|bench|config) ((COMP_CWORD > 2)) && verb="$verb ${COMP_WORDS[2]}" ;;
    esac
    case "$verb" in
        'chat')
            case $before in
                --max-tokens|--system|--stop|--temperature|--top-k|--top-p|--min-p|--repetition-penalty|--seed|--think-budget|--context|--threads|--defer|--kv-store-size)  ;;
                --resume) names='chats' ;;
                --numa) words='auto off' ;;
                --kv) words='bf16 fp8' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                --placement|--server-key-file|--output|--schema) files='any' ;;
                --prefill-threshold) words='never' ;;
                --draft) words='off lookup' ;;
                --kv-store) words='STORE off' ;;
                --attach) words='loaded always never' ;;
                --server) words='URL off' ;;
                --format) words='json' ;;
                *) options='--greedy --max-tokens --system --stop --temperature --top-k --top-p --min-p --repetition-penalty --seed --think --no-think --think-budget --hide-thinking --continue --resume --allow-special --context --threads --numa --kv --device --gpus --gpu-experts --placement --defer --prefill-threshold --draft --no-kv-cache --kv-store --kv-store-size --insecure --attach --no-attach --server --server-key-file --stats --explain-cache --json --jsonl --output --schema --format --yes --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'serve')
            case $before in
                --host) words='ADDRESS' ;;
                --port) words='PORT' ;;
                --api-key) words='KEY' ;;
                --api-key-file|--record-trace|--placement) files='any' ;;
                --allow-origin) words='ORIGIN' ;;
                --allow-host|--parallel|--model-alias|--kv-store-size|--context|--threads|--defer)  ;;
                --root-path) words='PATH' ;;
                --max-pause|--drain) words='SECONDS' ;;
                --adapter) words='ADAPTER' ;;
                --keep-alive) words='TIME' ;;
                --kv-store) words='STORE off' ;;
                --kv-events) words='ADDRESS off' ;;
                --engine) words='kt sglang-kt' ;;
                --method) words='METHOD' ;;
                --expert-weights) words='FOLDER' ;;
                --machine) words='cloud-h200-128gb desktop-24gb-gpu laptop-16gb laptop-8gb-gpu server-8xl20-1tb workstation-2x4090 workstation-4090-512gb xeon-2x32-512gb xeon-2x36-2x4090-1tb xeon-2x36-4090-512gb WORDS' files='any' ;;
                --numa) words='auto off' ;;
                --kv) words='bf16 fp8' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                --prefill-threshold) words='never' ;;
                *) options='--host --port --ollama --api-key --api-key-file --allow-origin --allow-host --root-path --parallel --max-pause --model-alias --adapter --strict-model --keep-alive --kv-store --kv-store-size --insecure --kv-events --drain --log-json --record-trace --background --print-unit --engine --method --expert-weights --trust-remote-code --dry-run --machine --context --threads --numa --kv --device --gpus --gpu-experts --placement --defer --prefill-threshold --yes --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'route')
            case $before in
                --host) words='ADDRESS' ;;
                --port|--metrics-port) words='PORT' ;;
                --model)  ;;
                --api-key-file|--control-key-file) files='any' ;;
                --drain) words='SECONDS' ;;
                --add|--remove) words='URL' ;;
                *) options='--host --port --metrics-port --model --api-key-file --control-key-file --drain --add --remove --background --print-unit --dry-run --json --quiet --help' words='URL' ;;
            esac ;;
        'store') options='--help' words='serve' ;;
        'store serve')
            case $before in
                --host) words='ADDRESS' ;;
                --port) words='PORT' ;;
                --memory|--join)  ;;
                *) options='--host --port --memory --join --insecure --json --quiet --help' ;;
            esac ;;
        'ps') options='--json --quiet --help' ;;
        'stop')
            case $before in
                --drain) words='SECONDS' ;;
                *) options='--all --drain --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'doctor')
            case $before in
                --record|--report) files='any' ;;
                *) options='--measure --verbose --record --report --json --help' ;;
            esac ;;
        'plan')
            case $before in
                --context|--threads|--defer)  ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --numa) words='auto off' ;;
                --kv) words='bf16 fp8' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                --placement|--write-placement) files='any' ;;
                --prefill-threshold) words='never' ;;
                --want) words='TOK_S' ;;
                --machine) words='cloud-h200-128gb desktop-24gb-gpu laptop-16gb laptop-8gb-gpu server-8xl20-1tb workstation-2x4090 workstation-4090-512gb xeon-2x32-512gb xeon-2x36-2x4090-1tb xeon-2x36-4090-512gb WORDS' files='any' ;;
                *) options='--context --experts --dense --threads --numa --kv --device --gpus --gpu-experts --placement --defer --prefill-threshold --want --machine --write-placement --json --help' names='all' files='.gguf' ;;
            esac ;;
        'search')
            case $before in
                --from) words='hf modelscope' ;;
                --limit)  ;;
                *) options='--hub --from --limit --json --quiet --help' ;;
            esac ;;
        'pull')
            case $before in
                --limit|--as)  ;;
                --from) words='hf modelscope' ;;
                *) options='--yes --limit --as --from --stream --no-stream --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'convert')
            case $before in
                --out) files='folders' ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --calibrate) words='auto built-in off' files='any' ;;
                --adapter) words='ADAPTER' ;;
                --as|--threads)  ;;
                *) options='--out --experts --dense --mixed --calibrate --adapter --as --threads --json --quiet --help' names='here' files='.gguf' ;;
            esac ;;
        'list') options='--all --json --quiet --help' ;;
        'alias')
            case $before in
                --file) files='any' ;;
                --system|--temperature|--top-k|--top-p|--min-p|--repetition-penalty|--seed|--stop|--max-tokens|--think-budget|--context)  ;;
                *) options='--file --system --temperature --top-k --top-p --min-p --repetition-penalty --seed --stop --max-tokens --think --no-think --think-budget --context --rm --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'show') options='--experts --program --json --help' names='all' files='.gguf' ;;
        'verify') options='--all --repair --json --quiet --help' names='here' files='.gguf' ;;
        'rm') options='--partial --checkpoint-only --yes --json --quiet --help' names='mine' files='.gguf' ;;
        'prune') options='--checkpoints --yes --json --quiet --help' ;;
        'du') options='--json --quiet --help' ;;
        'path') options='--checkpoint --json --help' names='here' files='.gguf' ;;
        'export') options='--checkpoint --all --json --quiet --help' names='here' files='any' ;;
        'import')
            case $before in
                --as)  ;;
                *) options='--as --json --quiet --help' files='any' ;;
            esac ;;
        'adapter') options='--help' words='import list show export verify rm' ;;
        'adapter import')
            case $before in
                --as)  ;;
                --base) names='all' files='.gguf' ;;
                *) options='--as --base --json --quiet --help' files='folders' ;;
            esac ;;
        'adapter list') options='--json --quiet --help' ;;
        'adapter show')
            case $before in
                --base) names='all' files='.gguf' ;;
                *) options='--base --json --quiet --help' words='ADAPTER' ;;
            esac ;;
        'adapter export')
            case $before in
                --layout) words='LAYOUT' ;;
                --base) names='all' files='.gguf' ;;
                *) options='--layout --base --json --quiet --help' words='ADAPTER' ;;
            esac ;;
        'adapter verify') options='--json --quiet --help' words='ADAPTER' ;;
        'adapter rm') options='--yes --json --quiet --help' words='ADAPTER' ;;
        'finetune')
            case $before in
                --data) files='any' ;;
                --as|--epochs|--steps|--rank|--lr|--show|--threads)  ;;
                --machine) words='cloud-h200-128gb desktop-24gb-gpu laptop-16gb laptop-8gb-gpu server-8xl20-1tb workstation-2x4090 workstation-4090-512gb xeon-2x32-512gb xeon-2x36-2x4090-1tb xeon-2x36-4090-512gb WORDS' files='any' ;;
                --numa) words='auto off' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                *) options='--data --as --epochs --steps --rank --lr --show --plan --machine --threads --numa --device --gpus --yes --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'placement') options='--help' words='import' ;;
        'placement import')
            case $before in
                --model) names='all' files='.gguf' ;;
                --output) files='any' ;;
                *) options='--model --output --json --quiet --help' files='any' ;;
            esac ;;
        'engine') options='--help' words='install list rm' ;;
        'engine install')
            case $before in
                --from) words='FOLDER' ;;
                *) options='--from --json --quiet --help' words='ENGINE' ;;
            esac ;;
        'engine list') options='--json --quiet --help' ;;
        'engine rm') options='--yes --json --quiet --help' words='ENGINE' ;;
        'cache') options='--help' words='du ls verify rm' ;;
        'cache du')
            case $before in
                --store) files='folders' ;;
                *) options='--store --json --quiet --help' ;;
            esac ;;
        'cache ls')
            case $before in
                --store) files='folders' ;;
                *) options='--store --json --quiet --help' ;;
            esac ;;
        'cache verify')
            case $before in
                --store) files='folders' ;;
                *) options='--store --json --quiet --help' ;;
            esac ;;
        'cache rm')
            case $before in
                --store) files='folders' ;;
                *) options='--store --yes --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'chats') options='--json --quiet --help' words='show search rm export rename' ;;
        'chats show') options='--json --quiet --help' names='chats' ;;
        'chats search') options='--json --quiet --help' ;;
        'chats rm') options='--yes --json --quiet --help' names='chats' ;;
        'chats export')
            case $before in
                --format) words='md json' ;;
                *) options='--format --json --quiet --help' names='chats' ;;
            esac ;;
        'chats rename') options='--json --quiet --help' names='chats' ;;
        'bench') options='--help' words='decode prefill resume kernel finetune mixed serve cache' ;;
        'bench decode')
            case $before in
                --layers|--tokens|--context|--batch|--threads|--defer|--runs)  ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --numa) words='auto off' ;;
                --kv) words='bf16 fp8' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                --placement|--trace) files='any' ;;
                --prefill-threshold) words='never' ;;
                --policy) words='kt all-cpu gpu-stream fiddler' ;;
                *) options='--layers --tokens --context --batch --experts --dense --threads --numa --kv --device --gpus --gpu-experts --placement --defer --prefill-threshold --policy --runs --profile --trace --json --help' names='all' files='.gguf' ;;
            esac ;;
        'bench prefill')
            case $before in
                --layers|--tokens|--context|--threads|--defer|--runs)  ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --numa) words='auto off' ;;
                --kv) words='bf16 fp8' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                --placement) files='any' ;;
                --prefill-threshold) words='never' ;;
                --policy) words='kt all-cpu gpu-stream fiddler' ;;
                *) options='--layers --tokens --context --experts --dense --threads --numa --kv --device --gpus --gpu-experts --placement --defer --prefill-threshold --policy --runs --profile --json --help' names='all' files='.gguf' ;;
            esac ;;
        'bench resume')
            case $before in
                --layers|--tokens|--threads|--runs)  ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --numa) words='auto off' ;;
                *) options='--layers --tokens --experts --dense --threads --numa --runs --json --help' names='all' files='.gguf' ;;
            esac ;;
        'bench kernel')
            case $before in
                --work) words='decode prefill linear' ;;
                --shape) words='A B C' ;;
                --format) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --tokens|--threads|--isa|--runs)  ;;
                --numa) words='auto off' ;;
                *) options='--work --shape --format --tokens --threads --numa --isa --runs --json --help' ;;
            esac ;;
        'bench finetune')
            case $before in
                --layers|--tokens|--length|--rank|--threads|--runs)  ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --numa) words='auto off' ;;
                *) options='--layers --tokens --length --rank --experts --dense --threads --numa --runs --json --help' names='all' files='.gguf' ;;
            esac ;;
        'bench mixed')
            case $before in
                --layers|--streams|--tokens|--threads|--defer)  ;;
                --experts) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32 auto' ;;
                --dense) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --numa) words='auto off' ;;
                --device) words='auto cpu cuda' names='gpus' ;;
                --gpus) words='all' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                --placement) files='any' ;;
                --prefill-threshold) words='never' ;;
                *) options='--layers --streams --tokens --experts --dense --threads --numa --device --gpus --gpu-experts --placement --defer --prefill-threshold --json --help' names='all' files='.gguf' ;;
            esac ;;
        'bench serve')
            case $before in
                --url) words='URL' ;;
                --model|--num-prompts|--max-concurrency|--input-len|--output-len|--seed)  ;;
                --request-rate) words='R' ;;
                --api-key) words='KEY' ;;
                --api-key-file|--output-file|--plot) files='any' ;;
                *) options='--url --model --num-prompts --request-rate --max-concurrency --input-len --output-len --seed --api-key --api-key-file --output-file --plot --json --help' ;;
            esac ;;
        'bench cache')
            case $before in
                --trace) files='any' ;;
                --memory|--disk|--servers|--routing|--spill|--bytes-per-token|--stretch|--block)  ;;
                --speed|--decode-speed) words='TOK_S' ;;
                --max-wait) words='SECONDS' ;;
                *) options='--trace --memory --disk --servers --routing --spill --speed --decode-speed --bytes-per-token --max-wait --stretch --block --json --help' names='all' files='.gguf' ;;
            esac ;;
        'eval')
            case $before in
                --data|--tasks|--out|--text|--plot|--placement) files='any' ;;
                --max-tokens|--defer|--tokens|--context|--stride|--threads)  ;;
                --against) names='all' files='.gguf' ;;
                --formats) words='int4 int4-g32 int4-g128 int4-g32-f32 int4-g128-f32 nl4 nl4-g32 int4-s8 nl4-s8 int4-row-had mxfp4 int6 int8 int8-row fp8 mxfp8 bf16 f32' ;;
                --kv) words='bf16 f32 fp8' ;;
                --numa) words='auto off' ;;
                --device) words='auto cpu' ;;
                --gpu-experts) words='uniform front hot' files='any' ;;
                *) options='--data --tasks --max-tokens --out --against --formats --defer --kv --split --text --tokens --context --stride --plot --allow-special --threads --numa --device --gpu-experts --placement --yes --json --quiet --help' names='all' files='.gguf' ;;
            esac ;;
        'config') options='--help' words='list get set unset edit path' ;;
        'config list') options='--json --quiet --help' ;;
        'config get') options='--json --quiet --help' words='home libraries model system temperature top-k top-p min-p seed stop max-tokens think think-budget thoughts markdown status when-full attach server server-key-file context kv draft device gpus placement defer threads numa host port api-key-file parallel max-pause keep-alive heat cache kv-store kv-store-size kv-insecure kv-events pull-limit isa tile-min debug' ;;
        'config set')
            case $before in
                home|libraries) files='folders' ;;
                model) names='all' files='.gguf' ;;
                think|markdown|status|heat|kv-insecure) words='on off' ;;
                thoughts) words='folded shown hidden' ;;
                when-full) words='drop stop' ;;
                attach) words='loaded always never' ;;
                server) words='URL off' ;;
                server-key-file|placement|api-key-file) files='any' ;;
                kv) words='bf16 fp8' ;;
                draft) words='off lookup' ;;
                device) words='auto cpu cuda' names='gpus' ;;
                gpus) words='all' ;;
                numa) words='auto off' ;;
                host) words='ADDRESS' ;;
                port) words='PORT' ;;
                max-pause) words='SECONDS' ;;
                keep-alive) words='TIME' ;;
                kv-store) words='STORE off' ;;
                kv-events) words='ADDRESS off' ;;
                *) options='--json --quiet --help' words='home libraries model system temperature top-k top-p min-p seed stop max-tokens think think-budget thoughts markdown status when-full attach server server-key-file context kv draft device gpus placement defer threads numa host port api-key-file parallel max-pause keep-alive heat cache kv-store kv-store-size kv-insecure kv-events pull-limit' ;;
            esac ;;
        'config unset') options='--json --quiet --help' words='home libraries model system temperature top-k top-p min-p seed stop max-tokens think think-budget thoughts markdown status when-full attach server server-key-file context kv draft device gpus placement defer threads numa host port api-key-file parallel max-pause keep-alive heat cache kv-store kv-store-size kv-insecure kv-events pull-limit' ;;
        'config edit') options='--help' ;;
        'config path') options='--json --quiet --help' ;;
        'completion')
            case $before in
                install|uninstall) words='bash zsh fish' ;;
                *) options='--json --help' words='bash zsh fish install uninstall' ;;
            esac ;;
    esac
    if [[ $word == -* && -n $options ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
        return
    fi
    case $names in
        all) words+=" $(kt names 2>/dev/null)" ;;
        here) words+=" $(kt names --here 2>/dev/null)" ;;
        mine) words+=" $(kt names --mine 2>/dev/null)" ;;
        chats) words+=" $(kt names --chats 2>/dev/null)" ;;
        gpus) words+=" $(kt names --gpus 2>/dev/null)" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case $files in
        any) COMPREPLY+=($(compgen -f -- "$word")) ;;
        .gguf) COMPREPLY+=($(compgen -d -- "$word") $(compgen -f -X '!*.gguf' -- "$word")) ;;
        folders) COMPREPLY+=($(compgen -d -- "$word")) ;;
    esac
}
# A colon is part of hf:org/repo.
COMP_WORDBREAKS=${COMP_WORDBREAKS//:}
complete -o filenames -F _kt kt
