"""Lists of kernels, launched from Python one by one on torch's current stream, in torch's memory.

`_way` says whether a pass may be launched so, `_refusal` which calls are served. `_forward` and `_backward` are the two
passes, `_scale` is a product with a number. What depends on shapes and options alone is a plan, found again by one key
(`_plan_cache`), and a plan holds launchers (`_launcher`).
"""
