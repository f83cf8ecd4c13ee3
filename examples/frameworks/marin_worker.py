"""Trains with Levanter's own loss and with the loss of ``examples/marin_head.py``; prints JSON.

``python -m examples.frameworks.marin_worker``, in an environment with marin-levanter.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import json

from levanter.models import lm_model

from examples import marin_head


def main() -> None:
    theirs, losses = lm_model.maybe_fused_next_token_loss, []
    for options in ({}, {"logsumexp_weight": 1e-2, "logit_soft_cap": 5.0}):
        lm_model.maybe_fused_next_token_loss = theirs
        want = marin_head.main(**options)
        before = marin_head.calls
        marin_head.install()
        losses.append({"want": want, "got": marin_head.main(**options), "calls": marin_head.calls - before})
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
