"""Files of the configuration and signatures of its classes, read on import: forks of the process have them then."""

from __future__ import annotations

import gc
import os

from ragen_pl.config.check import check_config
from ragen_pl.config.composition import compose_accepted
from support.runs import parsed_once  # noqa: F401

# the tests' folder comes first, see `support.runs.module_process.start_server`
paths = os.environ.pop("PYTHONPATH", "").split(os.pathsep)[1:]
if paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
for environment in ("frozenlake", "frozenlake_visual"):
    check_config(compose_accepted("fit", [f"env={environment}"])[0])
# a collection in a fork would copy the pages of all that was imported
gc.freeze()
