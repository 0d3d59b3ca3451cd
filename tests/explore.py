"""`make explore`: run the property tests with fresh seeds and 25 times the examples, round after round, for an hour.

`make test` runs the same properties derandomised, so all its runs use the same examples. A round that fails ends the
exploration and prints the seed that reproduces the failure.
"""

import argparse
import os
import random
import subprocess
import sys
import time

from hypothesis import HealthCheck, Phase, settings

SCALE_VARIABLE = "DDPLAB_EXAMPLES_SCALE"
SCALE = int(os.environ.get(SCALE_VARIABLE, "1"))
"""Factor on each property's number of examples; 1 in `make test`."""
TEST_TIMEOUT_S = 1800
EXAMPLES = 15
"""Number of examples of a property in `make test`, unless `examples` gives another one."""


def load_profile() -> None:
    """Load the Hypothesis profile of this run: derandomised in `make test`, with fresh seeds in `make explore`.

    Examples share ranks on purpose: a body leaves no state behind. There is no deadline because the
    machine is shared. The explain phase is off: it can outlast a test's time-out, and then the failure's message is
    lost.
    """
    settings.register_profile(
        "ddplab",
        deadline=None,
        max_examples=EXAMPLES * SCALE,
        derandomize=SCALE == 1,
        database=None,
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("ddplab")


def examples(count: int) -> settings:
    """Settings of a property that gets `count` examples in `make test`, and more in `make explore`."""
    return settings(max_examples=count * SCALE)


def main() -> None:
    """Explore until the time is over; exit with an error after the first round that fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long to explore; the last round is completed")
    parser.add_argument("--scale", type=int, default=25, help="factor on the number of examples in `make test`")
    parser.add_argument("tests", nargs="*", default=["tests"], help="which tests, as for pytest")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    rounds = 0
    while time.monotonic() < end:
        seed = random.SystemRandom().randrange(2**32)
        command = [sys.executable, "-m", "pytest", "-m", "hypothesis", f"--hypothesis-seed={seed}"]
        command += [f"--timeout={TEST_TIMEOUT_S}", "--exitfirst", *options.tests]
        print(f"round {rounds + 1}: {SCALE_VARIABLE}={options.scale} {' '.join(command)}", flush=True)
        status = subprocess.run(
            command, env=os.environ | {SCALE_VARIABLE: str(options.scale)}, check=False
        ).returncode
        if status:
            sys.exit(f"round {rounds + 1} failed; the line above it reproduces the failure")
        rounds += 1
    print(f"{rounds} rounds without a failure")


if __name__ == "__main__":
    main()
