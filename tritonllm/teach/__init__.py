"""What shows the engine at work (docs/teach.md): narration, x-ray, dashboard, trace and tutorial.

All of it looks at the events of a real engine (:mod:`tritonllm.events`) and changes nothing in it. Only the command
line, and the server for its traces, import from here. All but the tutorial and the writing of a trace needs the
packages of the extra ``tritonllm[teach]``.
"""
