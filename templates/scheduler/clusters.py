"""Tasks for clusters (Blackwell): every CTA's scheduler warp walks the same numbers, in rounds of requests.

A round asks for one number, or for ``ANSWERS`` at once when only empty ones are left. CTA 0 asks; the answers reach
every CTA of the cluster, whose scheduler decodes them and fills the slot of its own CTA. A round is asked for before
the numbers of the last one are handed over, so that its latency is hidden.

| source         | a number is                                 | asked for by          | answer |
|----------------|---------------------------------------------|-----------------------|--------|
| LaunchControl  | a cluster of the grid that has not started  | try_cancel, multicast | 16 opaque bytes |
| ClusterTickets | a ticket of one counter in global memory    | an addition           | CTA 0 writes it to each CTA |

| pipeline | producer                           | consumer                       | arrivals per phase |
|----------|------------------------------------|--------------------------------|--------------------|
| answers  | the hardware, or CTA 0's scheduler | the scheduler warp of each CTA | full, at each CTA: 1 (and 16 bytes) |
|          |                                    |                                | read, at CTA 0: one per CTA |

The task of a cluster is its number less that of the communication clusters.

Launch control keeps the order of ``order.py`` as long as clusters start in the order of their numbers: a number is
handed out only when all smaller ones have started or were handed out, so the task that a wait names is with a worker
already. The communication clusters have the smallest numbers, and none of them is handed out, since they start with
the launch. A refusal means that nothing is left, or that the machine wants the SM: then the cluster ends after the
numbers that it has, and what is left starts as clusters of its own.

The grid is an upper bound, as the token count is known on the device only. What lies beyond the last task is drained:
``ANSWERS`` numbers a round, which nobody else needs to hear of.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.experimental import primitives as prims

from mok_cute.config import ANSWERS
from mok_cute.templates import signal
from mok_cute.templates.interface import Plan
from mok_cute.templates.launch_args import TICKET, LaunchArgs
from mok_cute.templates.scheduler import order
from mok_cute.templates.scheduler.dynamic import NO_WORD, PrefixTable, Task, TaskDecoder, device_order
from mok_cute.templates.storage import ClusterStorage

NOTHING = -1  # no number


@cute.jit
def wait_at_cluster_scope(barrier: cute.Pointer, phase: Int32, ctas: cutlass.Constexpr):
    """Wait for arrivals that hand over what another CTA of the cluster wrote."""
    if const_expr(ctas > 1):
        done = prims.mbarrier_try_wait_parity(barrier, phase, scope=prims.MBarrierScope.CLUSTER)
        while not done:
            done = prims.mbarrier_try_wait_parity(barrier, phase, scope=prims.MBarrierScope.CLUSTER)
    else:
        cute.arch.mbarrier_wait(barrier, phase)


class ClusterScheduler(TaskDecoder):
    """The scheduler warp's program; a subclass is a source of numbers."""

    DRAIN: int  # numbers that a round asks for once only empty ones are left

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.ctas = plan.config.ctas_per_tile

    def first(self, a: LaunchArgs, lane: Int32) -> Int32:
        """The number that this cluster starts with, or NOTHING."""
        raise NotImplementedError

    def ask(
        self, counters: Int64, own: ClusterStorage, lane: Int32, rank: Int32, depth: Int32, read_phase: Int32
    ) -> None:
        """Ask for ``depth`` numbers, whose answers go to every CTA of the cluster."""
        raise NotImplementedError

    def receive(
        self, a: LaunchArgs, own: ClusterStorage, lane: Int32, depth: Int32, phase: Int32, round_phase: Int32
    ) -> tuple[Int32, Boolean]:
        """(number, whether there was one) for each lane of the round."""
        raise NotImplementedError

    def handled(self, taken: Int32) -> Int32:
        """How many clusters of the grid this one stands for."""
        raise NotImplementedError

    @cute.jit
    def run(
        self,
        a: LaunchArgs,
        counters: Int64,
        control: signal.WaitControl,
        prefix: cute.Pointer,  # (local_experts,) i32 in shared memory
        slot: cute.Pointer,  # (SLOT_WORDS,) i32 in shared memory
        full: cute.Pointer,  # mbarrier: the slot holds a task; 1 arrival
        empty: cute.Pointer,  # mbarrier: every reading warp of the CTA has read it
        own: ClusterStorage,
    ):
        o = device_order(self.geometry, a)
        table = PrefixTable(prefix, self.local_experts)
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        phase, read_phase, reduce_checked = Int32(0), Int32(0), Int32(0)
        answer_phase = Int32(0)  # of this lane's answer, which only some rounds use
        number = self.first(a, lane)  # of this lane in the present round
        count, depth = Int32(1), Int32(1)  # numbers of the present round, and of the one that is asked for next
        taken = Int32(1)  # this cluster's own number
        refused = Boolean(False)
        going = Boolean(True)
        while going:
            asked = depth
            if not refused:
                self.ask(counters, own, lane, rank, asked, read_phase)
            for i in cutlass.range(count, unroll=1):
                ticket = cute.arch.shuffle_sync(number, i)
                if ticket >= o.num_tasks:
                    depth = Int32(self.DRAIN)
                if (ticket >= 0) & (ticket < o.num_tasks):
                    task, reduce_checked = self.decode(a, counters, control, o, table, ticket, reduce_checked)
                    # A reduce task whose wait gave up is skipped. GEMM tasks are never: the peer walks them too.
                    if task.kind != order.END:
                        self.fill_slot(task, slot, full, empty, phase)
                        phase ^= 1
            number = Int32(NOTHING)
            if not refused:
                number, got = self.receive(a, own, lane, asked, answer_phase, read_phase)
                read_phase ^= 1
                answer_phase ^= Int32(lane < asked)
                granted = cute.arch.popc(cute.arch.vote_ballot_sync(got))
                taken += granted
                refused = granted < asked
                going = granted > 0
                count = asked
            else:
                going = Boolean(False)
        no_word = Int32(NO_WORD)
        zero = Int32(0)
        end = Task(Int32(order.END), zero, zero, zero, zero, zero, no_word, zero, no_word, no_word)
        self.fill_slot(end, slot, full, empty, phase)
        if lane == 0:
            own.handled[0] = self.handled(taken)

    @cute.jit
    def answers_are_read(self, own: ClusterStorage, lane: Int32):
        """This CTA has read the round: tell CTA 0, which may overwrite it."""
        cute.arch.sync_warp()
        if lane == 0:
            if const_expr(self.ctas > 1):
                prims.mbarrier_arrive(prims.mapa(own.answers_read, 0), scope=prims.MemScope.CLUSTER)
            else:
                cute.arch.mbarrier_arrive(own.answers_read)


class LaunchControl(ClusterScheduler):
    """Steals the clusters of this grid that have not started."""

    DRAIN = ANSWERS

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    def first(self, a: LaunchArgs, lane: Int32) -> Int32:
        """This cluster's own task; communication clusters have none."""
        cta, _, _ = cute.arch.block_idx()
        return self.task_of(a, cta)

    def task_of(self, a: LaunchArgs, cta: Int32) -> Int32:
        return Int32(cutlass.select_(cta >= a.comm_ctas, (cta - a.comm_ctas) // self.ctas, Int32(NOTHING)))

    def handled(self, taken: Int32) -> Int32:
        return taken

    @cute.jit
    def ask(self, counters: Int64, own: ClusterStorage, lane: Int32, rank: Int32, depth: Int32, read_phase: Int32):
        if lane < depth:
            cute.arch.mbarrier_arrive_and_expect_tx(own.answer_full + lane, 16)
        if rank == 0:
            wait_at_cluster_scope(own.answers_read, read_phase ^ 1, self.ctas)
            if lane < depth:
                cute.arch.issue_clc_query(own.answer_full + lane, own.answers + lane, multicast=self.ctas > 1)
        cute.arch.sync_warp()

    @cute.jit
    def receive(
        self, a: LaunchArgs, own: ClusterStorage, lane: Int32, depth: Int32, phase: Int32, round_phase: Int32
    ) -> tuple[Int32, Boolean]:
        """(number, whether there was one) for each lane of the round."""
        number, got = Int32(NOTHING), Boolean(False)
        if lane < depth:
            cute.arch.mbarrier_wait(own.answer_full + lane, phase)
            cta, _, _, ok = cute.arch.clc_response(own.answers + lane)
            if ok != 0:
                number, got = self.task_of(a, cta), Boolean(True)
            cute.arch.fence_proxy("async.shared", space="cta")  # our reads come before the next answer
        self.answers_are_read(own, lane)
        return number, got


class ClusterTickets(ClusterScheduler):
    """Tickets for a persistent grid of clusters: for virtual ranks that share a GPU, and for grids whose upper bound
    is far above the tasks there are."""

    DRAIN = 1

    @staticmethod
    def unsupported_reason(plan: Plan) -> str | None:
        return None

    def first(self, a: LaunchArgs, lane: Int32) -> Int32:
        return Int32(NOTHING)

    def handled(self, taken: Int32) -> Int32:
        return Int32(1)

    @cute.jit
    def ask(self, counters: Int64, own: ClusterStorage, lane: Int32, rank: Int32, depth: Int32, read_phase: Int32):
        if rank == 0:
            wait_at_cluster_scope(own.answers_read, read_phase ^ 1, self.ctas)
            if lane == 0:
                ticket = cute.arch.atomic_add(
                    signal.word_at(counters + TICKET * 4), Int32(1), sem="relaxed", scope="gpu"
                )
                for cta in cutlass.range_constexpr(self.ctas):
                    if const_expr(self.ctas > 1):
                        word = cute.recast_ptr(own.answers, dtype=Int32)
                        cute.arch.map_dsmem_ptr(word, cta)[0] = ticket
                        prims.mbarrier_arrive(prims.mapa(own.answer_full, cta), scope=prims.MemScope.CLUSTER)
                    else:
                        cute.recast_ptr(own.answers, dtype=Int32)[0] = ticket
                        cute.arch.mbarrier_arrive(own.answer_full)
        cute.arch.sync_warp()

    @cute.jit
    def receive(
        self, a: LaunchArgs, own: ClusterStorage, lane: Int32, depth: Int32, phase: Int32, round_phase: Int32
    ) -> tuple[Int32, Boolean]:
        """Lane 0's ticket, as long as there are tasks: the first beyond them ends the cluster."""
        wait_at_cluster_scope(own.answer_full, round_phase, self.ctas)
        ticket = cute.recast_ptr(own.answers, dtype=Int32)[0]
        self.answers_are_read(own, lane)
        return ticket, (lane == 0) & (ticket < device_order(self.geometry, a).num_tasks)
