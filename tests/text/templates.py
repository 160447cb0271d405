# ruff: noqa: E501 - templates are as they are published
"""Short chat templates in the manner of published ones, for the tests."""

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# One system text collected first; answers closed by the end-of-sentence token; thinking cut off.
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}\
{% set ns.is_first_sp = false %}\
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}\
{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}\
{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}\
{%- endfor -%}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

# Finds the last real question from behind; keeps the thinking of the answers after it only.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# Insists on turns, folds the system text into the first question, marks answers for training.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}{{- " " + message["content"] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

# Macros, filters and joins, as the longer templates have them.
MACROS = """\
{%- macro turn(message, mark='<|eot|>') -%}
{{ '[' ~ message.role|upper ~ ']' }}{{ message.content | trim | replace('\\r', '') }}{{ mark }}
{%- endmacro -%}
{%- set roles = messages | map(attribute='role') | list -%}
{{ roles | unique | join('+') }} {{ "%02d of %s"|format(messages|length, 'n') }}
{%- for message in messages if message.role != 'tool' %}
{%- if message.content == 'skip' %}{% continue %}{% endif %}
{{ turn(message) }}{% if loop.last %}{{ turn(message, mark='.') }}{% endif %}
{%- endfor %}
{{ {'b': [1, 2.5, none, true], 'a': 'é<>&"\\''} | tojson }}
{{ {'b': [1], 'a': {}} | tojson(indent=2) }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') | indent(2) }}
{%- for key, value in messages[0] | items %}{{ key }}={{ value|length }};{% endfor %}
{%- set packed %}<{{ roles[-1] }}>{% endset %}{{ packed * 2 }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ -3 % 2 }}
{{ ['x'] + ['y'] }}{{ 'abc'[::-1] }}{{ 'a,b'.split(',') | last | default('z') }}{{ undefined_name }}"""

ALL = {"chatml": CHATML, "deepseek": DEEPSEEK, "qwen3": QWEN3, "mistral": MISTRAL, "macros": MACROS}

# One construct or two each; what published templates are made of.
SNIPPETS = [
    # What is not there passes through filters, as it does in functionary's template.
    "{{ none|map('upper')|list }}{{ none|select|first }}{{ messages[0].tools|rejectattr('x')|join }}",
    "{% for t in none|selectattr('type', 'equalto', 'x') %}{{ t }}{% endfor %}{{ 'abc'|reverse }}",
    "{% set a, b = 1, 'x' %}{{ a ~ b }}",
    "{% for k, v in {'a':1,'b':[1,2]}.items() %}{{k}}={{v}},{% endfor %}",
    "{{ messages[0].get('content', '') }}{{ messages[0].get('zz') is none }}",
    "{{ [1,2,3]|reject('equalto',2)|join(', ') }}",
    "{% macro m(a,b=2) %}{{a}}{{b}}{{kwargs}}{{varargs}}{% endmacro %}{{ m(1,c=3) }}{{ m(1,2,3,4) }}",
    "{{ messages | tojson(ensure_ascii=False) }}{{ messages|tojson(indent=4) }}",
    "{% if messages[0].content is iterable and messages[0].content is not mapping %}y{% endif %}",
    "{{ true }}{{ none }}{{ 1.0 }}{{ [none, 'a', {'b': true}] }}",
    "{{ '%s-%d'|format('a', 3) }}{{ '%05.1f' % 2.5 }}",
    "{% macro mm() %}[{{ caller(3) }}]{% endmacro %}{% call(x) mm() %}{{x}}{% endcall %}",
    "{% with a=1 %}{{a}}{% endwith %}{{ a }}{% filter upper %}abc{{ 'd' }}{% endfilter %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x|length }}{{ x }}",
    "{{ messages|map(attribute='role')|unique|list }}{{ [3,1,2]|sort }}{{ {'b':1,'a':2}|dictsort }}",
    "{{ 'a,b'.split(',') }}{{ 'abc'[1:] }}{{ 'abc'|first }}{{ zz|default('y') }}{{ ''|default('q', true) }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.cycle('a','b') }}{{ loop.previtem is defined }}"
    "{{ loop.nextitem.role if loop.nextitem is defined }}{{ loop.changed(m.role) }}{% else %}0{% endfor %}",
    "{% for i in range(5) if i % 2 %}{{ i }}{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{{ 7/2 }}{{ 2**3 }}{{ -3 }}{{ +3 }}{{ 7 % 4 }}{{ 'a' * 3 }}{{ [1]*2 }}",
    "{{ '<b>'|e }}{{ '<b>'|safe }}{{ ('<b>'|e)|length }}{{ dict(a=1, b=2) }}{{ namespace(a=1).a }}",
    "{%- for i in [1,2,3] -%}{%- if i == 2 -%}{%- break -%}{%- endif -%}{{ i }}{%- endfor -%}",
    "  {% if true %}\n  x\n  {% endif %}\n y {#- c -#} z\n",
    "{{ 'abc'|replace('b','x')|title|capitalize|lower|upper }}{{ 'aXbX'.replace('X','-',1) }}",
    "{{ (1,2) + (3,) }}{{ (1,2)[0] }}{{ [[1,2],[3]] }}{{ messages[5] is defined }}",
    "{{ 'a\nb\nc'|indent(2) }}{{ 'a\nb'|indent(2, true) }}{{ 'a\n\nb'|indent('> ', blank=true) }}",
    "{{ 3|string ~ 2|int }}{{ '3'|int + 1 }}{{ '2.5'|float }}{{ 2.567|round(1) }}{{ -3|abs }}",
    "{{ 'abc' is string }}{{ 3 is number }}{{ {} is mapping }}{{ [] is sequence }}{{ none is none }}",
    "{{ 3 is odd }}{{ 3 is divisibleby(3) }}{{ 'a' is in ['a'] }}{{ x is undefined }}{{ true is true }}",
    "{{ [1,2,3,4]|select('gt', 2)|list }}{{ messages|selectattr('role','in',['user'])|list|length }}",
    "{{ 'a' if messages else 'b' }}{{ not messages }}{{ messages|length > 1 and 3 or 4 }}",
    "{{ 'é'|tojson }}{{ 'Hello'.startswith(('He','x')) }}{{ ' a b '.split() }}{{ 'a-b-c'.rsplit('-', 1) }}",
]
