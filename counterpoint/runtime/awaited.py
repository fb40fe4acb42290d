"""What a device waits for -> the words of an error that names it, and the peer that is gone."""

from counterpoint.core.notation import dump_task
from counterpoint.core.task import AllReduce, Clip, Receive, Send, Task
from counterpoint.runtime.transport import PeerGone


class Awaited:
    """What `device` waits for: the caller's thread, each lane that talks to a peer, a question to one.

    Who waits for nothing when it hears of the loss has at least come to some computation.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.by_caller: Task | None = None
        self.computed: Task | None = None
        self.by_lane: dict[str, Task] = {}
        self.asked, self.question = 0, ""

    def ask(self, peer: int, question: str) -> None:
        """Something is asked of a peer; nothing is any more if the question is empty."""
        self.asked, self.question = peer, question

    def text(self) -> str:
        """The end of a sentence about a lost peer."""
        first = [self.by_caller] if self.by_caller is not None else []
        found = dict.fromkeys(dump_task(task) for task in (*first, *tuple(self.by_lane.values())))
        found |= {self.question: None} if self.question else {}
        if found:
            return f"; device {self.device} was waiting for {', '.join(found)}"
        return f"; device {self.device} had come to {dump_task(self.computed)}" if self.computed is not None else ""

    def gone(self, task: Task | None, error: BaseException) -> str:
        """That the peer of a task, or of the question if there is none, is gone."""
        match error, task:
            case PeerGone(peer=peer), _:
                who = f"device {peer}"
            case _, (Send(_, peer) | Receive(_, peer)):
                who = f"device {peer}"
            case _, (AllReduce(peers=peers) | Clip(peers=peers)):
                who = f"one of devices {', '.join(map(str, peers))}"
            case _:
                who = f"device {self.asked}"
        return f"{who} is gone ({_reason(error)})"


def _reason(error: BaseException) -> str:
    """What gloo says, without the place in its sources."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition("] ")[2].partition(". ")[0][:120] or text[:120]
