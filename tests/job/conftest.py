"""Without torch only the tests of the config can run."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_[!c]*.py"]
