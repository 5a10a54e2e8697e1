"""An answer with everything in it, as a Qwen model would write it."""

TEXT = (
    "<think>\nI add.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 47, "b": 6}}\n</tool_call>\n'
    '<tool_call>\n{"name": "greet", "arguments": {"loud": true}}\n</tool_call>'
)
