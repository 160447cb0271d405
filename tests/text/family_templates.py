# ruff: noqa: E501 - a template's line is a line of its text
"""Chat templates in the documented formats of the families that kt runs, written for these tests.

What their models' cards describe: turns and their marks, system texts, tools and their calls and results,
thinking on and off, the prompt for an answer.
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception('tools need a first user message') }}{%- endif %}
    {%- set first_user = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first_user + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL_TOOLS = """\
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("Tool call IDs should have 9 letters") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- set content = message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user, assistant and tool roles, after an optional system text") }}{%- endif %}
{%- endfor %}"""

DEEPSEEK_V3_1 = """\
{% if not thinking is defined %}{% set thinking = false %}{% endif %}\
{% set ns = namespace(system_prompt='', is_tool=false, is_last_user=false) %}\
{%- for message in messages if message['role'] == 'system' %}{% set ns.system_prompt = ns.system_prompt + ('\\n\\n' if ns.system_prompt else '') + message['content'] %}{%- endfor %}\
{% if tools is defined and tools is not none %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n## Tools\\nYou have access to the following tools:\\n' %}\
{% for tool in tools %}{% set ns.system_prompt = ns.system_prompt + '\\n### ' + tool.function.name + '\\nDescription: ' + tool.function.description + '\\n\\nParameters: ' + (tool.function.parameters | tojson) + '\\n' %}{% endfor %}{% endif %}\
{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_last_user = true -%}{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}\
{%- if ns.is_last_user or ns.is_tool %}{{ '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.is_last_user = false -%}{%- set ns.is_tool = false -%}\
{%- for tool in message['tool_calls'] %}{%- if loop.first %}{{ (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}{%- endif %}\
{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + (tool['function']['arguments'] if tool['function']['arguments'] is string else tool['function']['arguments'] | tojson) + '<｜tool▁call▁end｜>' }}{%- endfor %}\
{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}\
{%- if ns.is_last_user %}{{ '<｜Assistant｜>' }}{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{ '<think>' }}{%- else %}{{ '</think>' }}{%- endif %}{%- endif %}{%- set ns.is_last_user = false -%}\
{%- set content = message['content'] -%}{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}\
{{ content + '<｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}\
{%- endfor -%}\
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}{{ '<｜Assistant｜>' }}{%- if not thinking %}{{ '</think>' }}{%- else %}{{ '<think>' }}{%- endif %}{% endif %}"""

KIMI_K2 = """\
{%- macro render_content(msg) -%}
    {%- set c = msg.get('content') -%}
    {%- if c is string -%}{{ c }}{%- elif c is not none -%}{% for content in c -%}{{ content['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>{%- endif -%}
    {%- set role_name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'user' -%}<|im_user|>{{ role_name }}<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ role_name }}<|im_middle|>
    {%- else -%}<|im_system|>{{ role_name }}<|im_middle|>{%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {{ render_content(message) }}<|tool_calls_section_begin|>
        {%- for tool_call in message['tool_calls'] -%}
            {%- set formatted_id = tool_call['id'] -%}<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>
            {%- if tool_call['function']['arguments'] is string -%}{{ tool_call['function']['arguments'] }}{%- else -%}{{ tool_call['function']['arguments'] | tojson }}{%- endif -%}<|tool_call_end|>
        {%- endfor -%}<|tool_calls_section_end|>
    {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}
{{ render_content(message) }}
    {%- elif message['role'] == 'assistant' -%}{%- if thinking is defined and thinking -%}<think></think>{%- endif -%}{{ render_content(message) }}
    {%- else -%}{{ render_content(message) }}{%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

QWEN3_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call functions within <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}{%- if reasoning and loop.last %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- (message.content or '').split('</think>')[-1].lstrip('\\n') }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and message.content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

GLM4 = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

You may call one or more functions. Their signatures:
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{% set content = visible_text(m.content) %}{{ content }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not content.endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}{%- set content = visible_text(m.content or '') %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}
{%- elif '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}"""

MINIMAX_M2 = """\
{%- set begin = ']~b]' -%}{%- set end = '[e~[' -%}
{%- macro render_tools(tool_list) -%}{%- for tool in tool_list -%}<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1, last_call=none) -%}
{%- set system_message = messages[0].content if messages and messages[0].role == 'system' else 'You are a helpful assistant.' -%}
{%- set conversation = messages[1:] if messages and messages[0].role == 'system' else messages -%}
{%- for m in conversation %}{%- if m.role == 'user' %}{%- set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{{- ']~!b[' ~ begin ~ 'system' ~ '\\n' ~ system_message }}
{%- if tools -%}{{- '\\n\\n# Tools\\n<tools>\\n' ~ render_tools(tools) ~ '</tools>\\n' }}{%- endif -%}
{{- end ~ '\\n' }}
{%- for message in conversation -%}
    {%- if message.role == 'assistant' -%}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' -%}
        {%- set content = message.content or '' -%}
        {%- if '</think>' in content %}{%- set reasoning = content.split('</think>')[0].strip('\\n').split('<think>')[-1].strip('\\n') %}{%- set content = content.split('</think>')[-1].strip('\\n') %}{%- endif %}
        {{- begin ~ 'ai' ~ '\\n' }}
        {%- if reasoning and loop.index0 > ns.last_user_index -%}{{- '<think>\\n' ~ reasoning ~ '\\n</think>\\n\\n' }}{%- endif -%}
        {%- if content -%}{{- content }}{%- endif -%}
        {%- if message.tool_calls -%}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for tool_call in message.tool_calls -%}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<invoke name="' ~ tool_call.name ~ '">' }}
                {%- for k, v in tool_call.arguments.items() %}{{- '<parameter name="' ~ k ~ '">' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</parameter>' }}{%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor -%}
            {{- '</minimax:tool_call>' }}{%- set ns.last_call = message.tool_calls[-1].function.name -%}
        {%- else -%}{%- set ns.last_call = none -%}{%- endif -%}
        {{- end ~ '\\n' }}
    {%- elif message.role == 'tool' -%}
        {%- if ns.last_call is none %}{{- raise_exception('a tool answered that nobody called') }}{%- endif %}
        {%- if loop.first or (conversation[loop.index0 - 1].role != 'tool') -%}{{- begin ~ 'tool' }}{%- endif -%}
        {{- '\\n<response>' ~ message.content ~ '</response>' }}
        {%- if loop.last or (conversation[loop.index0 + 1].role != 'tool') -%}{{- end ~ '\\n' -}}{%- endif -%}
    {%- else -%}{{- begin ~ message.role ~ '\\n' ~ message.content ~ end ~ '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- begin ~ 'ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{%- endif -%}"""

# gpt-oss: channels; tools as types of TypeScript; the thoughts of past answers are left out.
HARMONY = """\
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}{%- if spec['items'] -%}{{- type_of(spec['items']) + "[]" }}{%- else -%}{{- "any[]" }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}{{- spec.type | join(" | ") }}
    {%- elif spec.type == "string" -%}{%- if spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}{%- else -%}{{- "string" }}{%- if spec.nullable -%}{{- " | null" }}{%- endif -%}{%- endif -%}
    {%- elif spec.type in ("number", "integer") -%}{{- "number" }}
    {%- elif spec.type == "object" -%}{{- "object" }}
    {%- else -%}{{- "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(name, tools) -%}
    {{- "## " + name + "\\n\\nnamespace " + name + " {\\n\\n" }}
    {%- for tool in tools %}{%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "(_: {\\n" }}
            {%- for param, spec in tool.parameters.properties.items() %}
                {%- if spec.description %}{{- "// " + spec.description + "\\n" }}{%- endif %}
                {{- param }}{%- if param not in (tool.parameters.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}{{- type_of(spec) }}
                {%- if spec.default is defined -%}{{- ", // default: " }}{{- spec.default | tojson }}{%- else -%}{{- "," }}{%- endif -%}{{- "\\n" }}
            {%- endfor %}
            {{- "}) => any;\\n\\n" }}
        {%- else -%}{{- "() => any;\\n\\n" }}{%- endif -%}
    {%- endfor %}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>You are a large language model.\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\nReasoning: " + reasoning_effort + "\\n\\n# Valid channels: analysis, commentary, final." }}
{%- if tools -%}{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif -%}
{{- "<|end|>" }}
{%- if messages[0].role in ("developer", "system") %}{%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" }}{%- if developer %}{{- "# Instructions\\n\\n" + developer + "\\n\\n" }}{%- endif %}
    {%- if tools -%}{{- "# Tools\\n\\n" }}{{- namespace_of("functions", tools) }}{%- endif -%}{{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and message.content is string and "<|channel|>" in message.content %}{{- raise_exception("put thoughts into a field of their own") }}{%- endif %}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." ~ tool_call.name ~ "<|channel|>commentary " ~ (tool_call.content_type if tool_call.content_type is defined else "json") ~ "<|message|>" }}{{- tool_call.arguments|tojson }}{{- "<|call|>" }}
            {%- set last_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- set last_call.name = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception("a tool answered that nobody called") }}{%- endif %}
        {{- "<|start|>functions." + last_call.name }}{{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

ALL = {
    "llama3": LLAMA3,
    "mistral-tools": MISTRAL_TOOLS,
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "kimi-k2": KIMI_K2,
    "qwen3-tools": QWEN3_TOOLS,
    "glm4": GLM4,
    "minimax-m2": MINIMAX_M2,
    "harmony": HARMONY,
}
