"""What shows the engine at work (docs/teach.md): narration, x-ray, dashboard, trace and tutorial.

All of it looks at the events of a real engine (:mod:`tritonllm.events`) and changes nothing in it. Nothing outside the
command line imports from here, but for what a server tells about its engine, and its traces. All but the tutorial and
the writing of a trace needs the packages of the extra ``teach``.
"""
