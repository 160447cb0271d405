# bash completion for kt; made by: kt completion bash
_kt() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options='' words='' verb=''
    COMPREPLY=()
    case $before in
        --against|--calibrate|--context|--defer|--dense|--device|--experts|--format|--formats|--gpu-experts|--isa|--kv|--layers|--machine|--max-tokens|--min-p|--numa|--out|--plot|--policy|--prefill-threshold|--repetition-penalty|--runs|--seed|--shape|--stop|--stride|--system|--temperature|--text|--threads|--tokens|--top-k|--top-p|--trace|--work) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "chat doctor plan pull convert list show verify rm bench eval --help --version" -- "$word"))
        return
    fi
    verb=${COMP_WORDS[1]}
    case $verb in
        bench) ((COMP_CWORD > 2)) && verb="$verb ${COMP_WORDS[2]}" ;;
    esac
    case $verb in
        'chat') options='--greedy --max-tokens --system --stop --temperature --top-k --top-p --min-p --repetition-penalty --seed --think --allow-special --context --threads --numa --device --gpu-experts --defer --prefill-threshold --stats --json --quiet --help'; words='models' ;;
        'doctor') options='--measure --json --help'; words='' ;;
        'plan') options='--context --experts --dense --threads --numa --device --gpu-experts --defer --prefill-threshold --machine --json --help'; words='models' ;;
        'pull') options='--json --quiet --help'; words='models' ;;
        'convert') options='--out --experts --dense --mixed --calibrate --threads --json --quiet --help'; words='here' ;;
        'list') options='--all --json --quiet --help'; words='' ;;
        'show') options='--experts --json --help'; words='models' ;;
        'verify') options='--json --quiet --help'; words='here' ;;
        'rm') options='--partial --yes --json --quiet --help'; words='here' ;;
        'bench') options='--help'; words='decode prefill kernel' ;;
        'bench decode') options='--layers --tokens --context --experts --dense --threads --numa --device --gpu-experts --defer --prefill-threshold --policy --runs --profile --trace --json --help'; words='models' ;;
        'bench prefill') options='--layers --tokens --context --experts --dense --threads --numa --device --gpu-experts --defer --prefill-threshold --policy --runs --profile --json --help'; words='models' ;;
        'bench kernel') options='--work --shape --format --tokens --threads --numa --isa --runs --json --help'; words='' ;;
        'eval') options='--against --formats --defer --kv --text --tokens --context --stride --plot --allow-special --threads --numa --json --quiet --help'; words='models' ;;
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    elif [[ $word == */* || -z $words ]]; then
        COMPREPLY=($(compgen -f -- "$word"))
    else
        case $words in
            models) words=$(kt names 2>/dev/null) ;;
            here) words=$(kt names --here 2>/dev/null) ;;
        esac
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    fi
}
# A colon is part of hf:org/repo.
COMP_WORDBREAKS=${COMP_WORDBREAKS//:}
complete -o filenames -F _kt kt
