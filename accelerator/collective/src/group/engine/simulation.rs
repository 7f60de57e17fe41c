//! Runs the engines of all ranks of a world, in one thread, over connections whose costs a deterministic clock counts.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    mem,
    sync::{Arc, Mutex},
    time::Instant,
};

use super::*;
use crate::{
    buffer::Buffer,
    element::{DType, ReduceOp},
    fingerprint::{CallSite, OpKind},
    group::GroupOptions,
    topology::TransportKind,
    transport::{
        ControlPlane, DataPlane, FinalMessage, Inbox, Peer, PeerLocation, Poller, tests::number,
    },
};

/// The costs of messages, in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// The time of a core for a message, at each end.
    message: u64,
    /// The time of a core for a byte of a message, at each end.
    byte: u64,
    /// The time of a core to combine a byte of another rank.
    combine: u64,
    /// The time of a core to continue a rank that has waited.
    switch: u64,
    /// The thousandths by which every other rank of a core lengthens its times, since its caches hold less of each.
    crowding: u64,
    /// The time from the beginning of sending to that of arriving.
    latency: u64,
    /// The time of the sender's and of the receiver's link for a byte.
    link: u64,
    /// The number of cores that all ranks share; `None` if each rank has one.
    cores: Option<usize>,
}

/// Hosts of one rank each, on links of 100 Gbit/s.
const CLUSTER: Costs = Costs {
    message: 2_500_000,
    byte: 100,
    combine: 50,
    switch: 5_000_000,
    crowding: 0,
    latency: 10_000_000,
    link: 80,
    cores: None,
};

/// Ranks on the two cores of one machine. With these costs the times of sums of 4 B to 64 KiB on 4 to 64 ranks are
/// within 20 % of those that `accel-launch bench` measured on a virtual machine.
const TWO_CORES: Costs = Costs {
    message: 1_340_000,
    byte: 202,
    combine: 49,
    switch: 6_410_000,
    crowding: 30,
    latency: 0,
    link: 0,
    cores: Some(2),
};

/// All that the ranks send, until it is delivered.
#[derive(Debug, Default)]
struct Network {
    inboxes: Vec<Arc<Inbox>>,
    sent: Mutex<Vec<(usize, RecvChunk)>>,
}

#[derive(Debug)]
struct Port(Arc<Network>);

impl DataPlane for Port {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn send(
        &self,
        to: usize,
        chunk: OutgoingChunk<'_>,
        _: &mut OpDeadline,
        _: Option<&Poller>,
    ) -> Result<()> {
        let mut payload = self.0.inboxes[to].chunk(chunk.payload.len());
        payload.bytes_mut().copy_from_slice(chunk.payload);
        let received = RecvChunk {
            tag: chunk.tag,
            fingerprint: chunk.fingerprint.copied(),
            payload,
        };
        self.0.sent.lock().unwrap().push((to, received));
        Ok(())
    }

    fn wait_for_arrival(&self, _: u64, _: Instant, _: Option<&Poller>) {
        unreachable!("the operation is resumed by the test");
    }
}

impl ControlPlane for Port {
    fn leave(&self, _: &FinalMessage) {}

    fn last_activity(&self, _: usize) -> Option<Instant> {
        None
    }
}

/// One rank in the middle of a sum.
struct SimulatedRank {
    transport: Transport,
    deadline: OpDeadline,
    scratch: Scratch,
    buffer: Buffer,
    running: ResumableOp,
    ended: Option<Result<()>>,
    /// The chunks that wait for it to run, and their senders.
    received: Vec<(usize, RecvChunk)>,
    /// The times at which its link is free again, each way.
    outgoing: u64,
    incoming: u64,
}

impl SimulatedRank {
    fn new(
        rank: usize,
        peers: &Arc<[Peer]>,
        network: &Arc<Network>,
        kind: OpKind,
        len: usize,
    ) -> Self {
        let port = Arc::new(Port(Arc::clone(network)));
        let inbox = Arc::clone(&network.inboxes[rank]);
        let fingerprint = CollectiveFingerprint::new(kind, CallSite::new("here.rs", 1))
            .with_op(ReduceOp::Sum)
            .with_data(DType::F32, len);
        let timeouts = GroupOptions::new().op_timeouts();
        let mut scratch = Scratch::default();
        scratch.clear(peers.len());
        let mut buffer = Buffer::zeroed(DType::F32, len);
        for (index, value) in buffer.as_mut_slice().unwrap().iter_mut().enumerate() {
            *value = sample(rank, index);
        }
        let op = BufferOp::AllReduce(ReduceOp::Sum);
        Self {
            transport: Transport::new(Arc::clone(peers), inbox, port.clone(), Some(port)),
            deadline: OpDeadline::new(rank, number(0), fingerprint, timeouts, Instant::now()),
            running: op.begin(DType::F32, buffer.bytes().len(), peers.len()),
            scratch,
            buffer,
            ended: None,
            received: Vec::new(),
            outgoing: 0,
            incoming: 0,
        }
    }

    /// Continues as far as what has come allows.
    fn advance(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let mut ctx = OpContext::resumed(
            &self.transport,
            &mut self.deadline,
            &mut self.scratch,
            OpPosition::First,
        );
        self.ended = match self.running.advance(&mut ctx, self.buffer.bytes_mut()) {
            Ok(OpProgress::Waiting(_)) => None,
            Ok(OpProgress::Done) => Some(Ok(())),
            Err(error) => Some(Err(ctx.disagreement(error))),
        };
    }
}

/// A world whose ranks each begin a sum.
struct Simulation {
    costs: Costs,
    network: Arc<Network>,
    ranks: Vec<SimulatedRank>,
    cores: Vec<Core>,
    /// The next events: their times, and their places in `found`.
    events: BinaryHeap<Reverse<(u64, usize)>>,
    /// All events, those that have happened included.
    found: Vec<Option<Event>>,
    messages: usize,
}

#[derive(Debug)]
enum Event {
    /// A chunk begins to arrive, and keeps the link of its receiver busy.
    Arrives {
        from: usize,
        to: usize,
        chunk: RecvChunk,
    },
    Received {
        from: usize,
        to: usize,
        chunk: RecvChunk,
    },
    /// A core has done what the rank had to do that ran on it.
    CoreIsFree(usize),
}

/// A core, and the ranks that have something to do on it.
#[derive(Debug, Default)]
struct Core {
    is_busy: bool,
    waiting: VecDeque<usize>,
}

impl Simulation {
    /// The ranks sum as many numbers as `len` returns for each.
    fn new(costs: Costs, world_size: usize, kind: OpKind, len: impl Fn(usize) -> usize) -> Self {
        let inboxes = (0..world_size).map(|_| Arc::new(Inbox::new(world_size)));
        let network = Arc::new(Network {
            inboxes: inboxes.collect(),
            sent: Mutex::default(),
        });
        let peers: Arc<[Peer]> = (0..world_size)
            .map(|rank| Peer {
                rank,
                location: PeerLocation::Thread,
            })
            .collect();
        let ranks =
            (0..world_size).map(|rank| SimulatedRank::new(rank, &peers, &network, kind, len(rank)));
        Self {
            costs,
            ranks: ranks.collect(),
            network,
            cores: (0..costs.cores.unwrap_or(world_size))
                .map(|_| Core::default())
                .collect(),
            events: BinaryHeap::new(),
            found: Vec::new(),
            messages: 0,
        }
    }

    /// Runs the world until nothing is under way, and returns the time at which the last rank was done.
    fn run(&mut self) -> u64 {
        for rank in 0..self.ranks.len() {
            self.wake(rank, 0);
        }
        let mut last = 0;
        while let Some(Reverse((time, index))) = self.events.pop() {
            match self.found[index].take().unwrap() {
                Event::Arrives { from, to, chunk } => {
                    let rank = &mut self.ranks[to];
                    rank.incoming = time.max(rank.incoming) + chunk.len() * self.costs.link;
                    let received = rank.incoming;
                    self.add(received, Event::Received { from, to, chunk });
                }
                Event::Received { from, to, chunk } => {
                    self.ranks[to].received.push((from, chunk));
                    self.wake(to, time);
                }
                Event::CoreIsFree(core) => {
                    last = time;
                    self.cores[core].is_busy = false;
                    if let Some(rank) = self.cores[core].waiting.pop_front() {
                        self.run_rank(rank, time);
                    }
                }
            }
        }
        last
    }

    fn add(&mut self, time: u64, event: Event) {
        self.events.push(Reverse((time, self.found.len())));
        self.found.push(Some(event));
    }

    /// Lets a rank run, now or when its core is free.
    fn wake(&mut self, rank: usize, time: u64) {
        let core = rank % self.cores.len();
        let core = &mut self.cores[core];
        match core.is_busy {
            false => self.run_rank(rank, time),
            true if core.waiting.contains(&rank) => {}
            true => core.waiting.push_back(rank),
        }
    }

    /// Lets a rank take all that it has received, and send what follows.
    fn run_rank(&mut self, rank: usize, time: u64) {
        let costs = self.costs;
        let others = self.ranks.len().div_ceil(self.cores.len()) as u64 - 1;
        let slowed = |time: u64| time + time * others * costs.crowding / 1000;
        let handled = |len: u64| costs.message + len * costs.byte;
        let mut clock = time + slowed(costs.switch);
        for (from, chunk) in mem::take(&mut self.ranks[rank].received) {
            let combined = match chunk.tag.phase {
                OpPhase::Header | OpPhase::Reduce => chunk.len() * costs.combine,
                OpPhase::Gather => 0,
            };
            clock += slowed(handled(chunk.len()) + combined);
            self.network.inboxes[rank].push(from, chunk);
        }
        self.ranks[rank].advance();
        let sent = mem::take(&mut *self.network.sent.lock().unwrap());
        for (to, chunk) in sent {
            clock += slowed(handled(chunk.len()));
            let begins = clock.max(self.ranks[rank].outgoing);
            self.ranks[rank].outgoing = begins + chunk.len() * costs.link;
            self.messages += 1;
            let arrives = Event::Arrives {
                from: rank,
                to,
                chunk,
            };
            self.add(begins + costs.latency, arrives);
        }
        let core = rank % self.cores.len();
        self.cores[core].is_busy = true;
        self.add(clock, Event::CoreIsFree(core));
    }
}

impl RecvChunk {
    fn len(&self) -> u64 {
        self.payload.bytes().len() as u64
    }
}

/// A value that no other rank has, and whose sums depend on their order.
fn sample(rank: usize, index: usize) -> f32 {
    1.0 + 1.0 / (3.0 + rank as f32 + 17.0 * index as f32)
}

/// The time of a sum, in microseconds, and the number of messages. Headers of operations of this kind that come with
/// connecting go directly; that of an all-reduce as its size says.
fn time(costs: Costs, world_size: usize, kind: OpKind, len: usize) -> (f64, usize) {
    let mut simulation = Simulation::new(costs, world_size, kind, |_| len);
    let time = simulation.run();
    assert!(
        simulation
            .ranks
            .iter()
            .all(|rank| matches!(rank.ended, Some(Ok(()))))
    );
    (time as f64 / 1e6, simulation.messages)
}

#[test]
fn sums_are_in_rank_order_whichever_way_they_go() {
    for world_size in [2, 3, 15, 16, 17, 31, 33, 130] {
        for len in [0, 1, 10, 300, 2_000, 5_000] {
            let mut simulation = Simulation::new(CLUSTER, world_size, OpKind::AllReduce, |_| len);
            simulation.run();
            let sums: Vec<f32> = (0..len)
                .map(|index| {
                    (1..world_size).fold(sample(0, index), |sum, rank| sum + sample(rank, index))
                })
                .collect();
            for (rank, state) in simulation.ranks.iter().enumerate() {
                assert!(
                    matches!(state.ended, Some(Ok(()))),
                    "rank {rank} of {world_size}"
                );
                assert_eq!(
                    state.buffer.as_slice::<f32>().unwrap(),
                    sums,
                    "{world_size} ranks"
                );
            }
        }
    }
}

#[test]
fn a_rank_sends_a_message_per_round() {
    for (world_size, rounds) in [(16, 4), (17, 5), (100, 7), (128, 7)] {
        let (_, messages) = time(CLUSTER, world_size, OpKind::AllReduce, 100);
        assert_eq!(messages, rounds * world_size);
        let (_, messages) = time(CLUSTER, world_size, OpKind::Connect, 100);
        assert_eq!(messages, (world_size - 1) * world_size);
    }
}

#[test]
fn rounds_take_less_time_in_large_worlds() {
    let ratio = |costs, world_size| {
        let (rounds, _) = time(costs, world_size, OpKind::AllReduce, 100);
        let (direct, _) = time(costs, world_size, OpKind::Connect, 100);
        rounds / direct
    };
    assert!(ratio(TWO_CORES, 16) < 0.8);
    assert!(ratio(CLUSTER, 16) < 1.25);
    assert!(ratio(CLUSTER, 32) < 0.9);
    assert!(ratio(CLUSTER, 256) < 0.2);
}

/// A rank that takes no part in the rounds, since it calls something larger, is named by all.
#[test]
fn ranks_that_disagree_find_it_though_some_send_directly() {
    for stranger in [0, 5, 19] {
        let len = |rank| if rank == stranger { 100_000 } else { 10 };
        let mut simulation = Simulation::new(CLUSTER, 20, OpKind::AllReduce, len);
        simulation.run();
        let mut texts: Vec<String> = simulation
            .ranks
            .iter()
            .map(|rank| match &rank.ended {
                Some(Err(error)) if error.is_mismatch() => error.to_string(),
                other => panic!("{other:?}"),
            })
            .collect();
        texts.dedup();
        assert_eq!(texts.len(), 1, "{texts:?}");
        assert!(
            texts[0].contains(&format!("rank {stranger}: ")),
            "{}",
            texts[0]
        );
    }
}

/// The rank that takes part in rounds, and the one that sends directly, name the sender of what cannot be read.
#[test]
fn rounds_that_cannot_be_read_are_errors() {
    let blocks = |first: u32, head_len: u16, payload_len: u32, rest: &[u8]| {
        let mut frame = first.to_le_bytes().to_vec();
        frame.extend(head_len.to_le_bytes());
        frame.extend(payload_len.to_le_bytes());
        frame.extend(rest);
        frame
    };
    let payloads = [
        Vec::new(),
        vec![0; 3],
        // A frame without a header.
        vec![0; 4],
        blocks(0, 0, 40, &[0; 39]),
        blocks(0, 0, 40, &[0; 41]),
        blocks(1, 0, 40, &[0; 40]),
        blocks(u32::MAX, 0, 40, &[0; 40]),
        blocks(0, 0, u32::MAX, &[0; 40]),
        // Data that could not be forwarded.
        blocks(0, 0, 9000, &[0; 9000]),
        blocks(0, u16::MAX, 40, &[0; 40]),
        blocks(0, 30, 40, &[0xFF; 70]),
        // A second block, which the round does not have.
        blocks(0, 0, 0, &[0; 6]),
    ];
    let cases = payloads.iter().map(|payload| (1, payload));
    let whole = blocks(0, 0, 40, &[0; 40]);
    // Rank 1 sends rank 0 the first round only.
    let cases = cases.chain([2, 5, 6, 64, 65, u32::MAX].map(|index| (index, &whole)));
    for (index, payload) in cases {
        for len in [10, 100_000] {
            let mut simulation = Simulation::new(CLUSTER, 16, OpKind::AllReduce, |_| len);
            let rank = &mut simulation.ranks[0];
            rank.advance();
            let mut chunk = simulation.network.inboxes[0].chunk(payload.len());
            chunk.bytes_mut().copy_from_slice(payload);
            let received = RecvChunk {
                tag: Tag {
                    group: rank.deadline.number.group,
                    sequence: 0,
                    phase: OpPhase::Header,
                    index,
                },
                fingerprint: Some(rank.deadline.fingerprint),
                payload: chunk,
            };
            simulation.network.inboxes[0].push(1, received);
            rank.advance();
            match &rank.ended {
                Some(Err(error)) => {
                    assert!(error.is_protocol(), "{error}");
                    assert_eq!(error.ranks(), [1], "{error}");
                }
                other => panic!("round {index} of {payload:?}: {other:?}"),
            }
        }
    }
}

/// Prints the times of sums. The variables are lists of numbers, separated by commas: `COSTS` has the fields of [`Costs`],
/// the last of which is 0 if each rank has a core, `RANKS` the numbers of ranks, and `BYTES` the sizes.
#[test]
#[ignore = "prints a table for people"]
fn table() {
    let list = |name, usual: &[u64]| match std::env::var(name) {
        Err(_) => usual.to_vec(),
        Ok(text) => text.split(',').map(|part| part.parse().unwrap()).collect(),
    };
    let usual = CLUSTER;
    let costs = list(
        "COSTS",
        &[
            usual.message,
            usual.byte,
            usual.combine,
            usual.switch,
            usual.crowding,
            usual.latency,
            usual.link,
            0,
        ],
    );
    let [
        message,
        byte,
        combine,
        switch,
        crowding,
        latency,
        link,
        cores,
    ] = costs[..]
    else {
        panic!("expected eight numbers");
    };
    let costs = Costs {
        message,
        byte,
        combine,
        switch,
        crowding,
        latency,
        link,
        cores: (cores > 0).then_some(cores as usize),
    };
    for world_size in list("RANKS", &[2, 4, 8, 16, 32, 64, 128, 256, 512]) {
        for bytes in list("BYTES", &[4, 4 << 10, 64 << 10, 1 << 20]) {
            let (world_size, len) = (world_size as usize, bytes as usize / size_of::<f32>());
            let (time, messages) = time(costs, world_size, OpKind::AllReduce, len);
            println!("{world_size:4} ranks {bytes:9} bytes {time:12.1} us {messages:8} messages");
        }
    }
}
