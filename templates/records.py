"""The record that a wait leaves in host-mapped memory when it gives up: word layout and codes, for both sides."""

from mok_cute.templates.scheduler.order import SIGNALS

# Words, int32. STATUS is written last; AGE_NS takes two words.
RECORD_WORDS = 16
STATUS, KERNEL, RANK, CTA, ROLE, SIGNAL, INDEX, SEEN, EXPECTED, EPOCH, AGE_NS = range(11)

KERNEL_FORWARD, KERNEL_SCHEDULE = 0, 1
ROLE_LOAD, ROLE_SCHEDULER, ROLE_STORE, ROLE_DISPATCH = range(4)
ROLE_SCHEDULE = 16
ROLE_NAMES = {
    ROLE_LOAD: "load",
    ROLE_SCHEDULER: "scheduler",
    ROLE_STORE: "store",
    ROLE_DISPATCH: "dispatch",
    ROLE_SCHEDULE: "schedule",
}

SIGNAL_CODE = {signal.name: code for code, signal in enumerate(SIGNALS)}
SCHEDULE_FLAG = 32
PER_PEER = ("entry", "exit", "schedule_flag")  # the index of these signals is a peer rank


def signal_name(code: int) -> str:
    if code == SCHEDULE_FLAG:
        return "schedule_flag"
    return SIGNALS[code].name if 0 <= code < len(SIGNALS) else f"signal {code}"
