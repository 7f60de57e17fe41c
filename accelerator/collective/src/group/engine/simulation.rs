//! Runs the engines of all ranks of a world, in one thread, over connections whose costs a deterministic clock counts.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
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
    /// The time from the end of sending to the beginning of receiving.
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
    latency: 15_000_000,
    link: 80,
    cores: None,
};

/// Ranks on the two cores of one machine.
const TWO_CORES: Costs = Costs {
    message: 2_500_000,
    byte: 150,
    combine: 60,
    latency: 3_000_000,
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
}

impl SimulatedRank {
    fn advance(&mut self) {
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
    /// The times at which cores, and links each way, are free again.
    cores: Vec<u64>,
    outgoing: Vec<u64>,
    incoming: Vec<u64>,
    messages: usize,
}

impl Simulation {
    /// The ranks sum as many numbers as `len` returns for each.
    fn new(costs: Costs, world_size: usize, kind: OpKind, len: impl Fn(usize) -> usize) -> Self {
        let network = Arc::new(Network {
            inboxes: (0..world_size)
                .map(|_| Arc::new(Inbox::new(world_size)))
                .collect(),
            sent: Mutex::default(),
        });
        let peers: Arc<[Peer]> = (0..world_size)
            .map(|rank| Peer {
                rank,
                location: PeerLocation::Thread,
            })
            .collect();
        let ranks = (0..world_size).map(|rank| {
            let port = Arc::new(Port(Arc::clone(&network)));
            let inbox = Arc::clone(&network.inboxes[rank]);
            let fingerprint = CollectiveFingerprint::new(kind, CallSite::new("here.rs", 1))
                .with_op(ReduceOp::Sum)
                .with_data(DType::F32, len(rank));
            let mut scratch = Scratch::default();
            scratch.clear(world_size);
            let mut buffer = Buffer::zeroed(DType::F32, len(rank));
            for (index, value) in buffer.as_mut_slice().unwrap().iter_mut().enumerate() {
                *value = sample(rank, index);
            }
            let op = BufferOp::AllReduce(ReduceOp::Sum);
            SimulatedRank {
                transport: Transport::new(Arc::clone(&peers), inbox, port.clone(), Some(port)),
                deadline: OpDeadline::new(
                    rank,
                    number(0),
                    fingerprint,
                    GroupOptions::new().op_timeouts(),
                    Instant::now(),
                ),
                running: op.begin(DType::F32, buffer.bytes().len(), world_size),
                scratch,
                buffer,
                ended: None,
            }
        });
        Self {
            costs,
            ranks: ranks.collect(),
            network,
            cores: vec![0; costs.cores.unwrap_or(world_size)],
            outgoing: vec![0; world_size],
            incoming: vec![0; world_size],
            messages: 0,
        }
    }

    /// Runs the world until nothing is under way, and returns the time at which the last rank was done.
    fn run(&mut self) -> u64 {
        let costs = self.costs;
        let world_size = self.ranks.len();
        // Every rank begins with an event that brings no chunk.
        let mut chunks: Vec<Option<RecvChunk>> = (0..world_size).map(|_| None).collect();
        let mut events: BinaryHeap<_> = (0..world_size)
            .map(|rank| Reverse((0, rank, Arrival::Received, rank, rank)))
            .collect();
        let mut last = 0;
        while let Some(Reverse((time, index, arrival, from, to))) = events.pop() {
            let len = chunks[index].as_ref().map_or(0, RecvChunk::len);
            if arrival == Arrival::Begins {
                self.incoming[to] = time.max(self.incoming[to] + len * costs.link);
                let time = self.incoming[to];
                events.push(Reverse((time, index, Arrival::Received, from, to)));
                continue;
            }
            let core = to % self.cores.len();
            let mut clock = self.cores[core].max(time);
            if let Some(chunk) = chunks[index].take() {
                clock += costs.message + len * costs.byte;
                if chunk.tag.phase != OpPhase::Gather {
                    clock += len * costs.combine;
                }
                self.network.inboxes[to].push(from, chunk);
            }
            if self.ranks[to].ended.is_none() {
                self.ranks[to].advance();
            }
            let (rank, sent) = (to, mem::take(&mut *self.network.sent.lock().unwrap()));
            for (to, chunk) in sent {
                clock += costs.message + chunk.len() * costs.byte;
                let left = self.outgoing[rank].max(clock) + chunk.len() * costs.link;
                self.outgoing[rank] = left;
                let begins = left + costs.latency - (chunk.len() * costs.link).min(costs.latency);
                events.push(Reverse((begins, chunks.len(), Arrival::Begins, rank, to)));
                chunks.push(Some(chunk));
                self.messages += 1;
            }
            self.cores[core] = clock;
            last = last.max(clock);
        }
        last
    }
}

/// A chunk keeps the link of its receiver busy from when it begins to arrive until it has been received.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Arrival {
    Begins,
    Received,
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
    for world_size in [2, 3, 15, 16, 17, 31, 33, 100] {
        for len in [0, 1, 10, 300, 5_000] {
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
    assert!(ratio(TWO_CORES, 16) < 0.6);
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
    let block = |head_len: u16, payload_len: u32, rest: &[u8]| {
        let mut block = head_len.to_le_bytes().to_vec();
        block.extend(payload_len.to_le_bytes());
        block.extend(rest);
        block
    };
    let payloads = [
        Vec::new(),
        block(0, 40, &[0; 39]),
        block(0, 40, &[0; 41]),
        block(0, u32::MAX, &[0; 40]),
        block(u16::MAX, 40, &[0; 40]),
        block(30, 40, &[0xFF; 70]),
        block(0, 0, &[]).repeat(2),
    ];
    let cases = payloads.iter().map(|payload| (1, payload));
    let whole = block(0, 40, &[0; 40]);
    let cases = cases.chain([5, 6, 64, 65, u32::MAX].map(|index| (index, &whole)));
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

/// Prints the times of sums of several sizes; `COSTS` are those of the fields of [`Costs`], separated by commas.
#[test]
#[ignore = "prints a table for people"]
fn table() {
    let costs = match std::env::var("COSTS") {
        Err(_) => CLUSTER,
        Ok(text) => {
            let costs: Vec<u64> = text.split(',').map(|part| part.parse().unwrap()).collect();
            let [message, byte, combine, latency, link, cores] = costs[..] else {
                panic!("expected six numbers");
            };
            Costs {
                message,
                byte,
                combine,
                latency,
                link,
                cores: (cores > 0).then_some(cores as usize),
            }
        }
    };
    for world_size in [2, 4, 8, 16, 32, 64, 128, 256, 512] {
        for bytes in [4, 4 << 10, 64 << 10, 1 << 20, 25_000_000] {
            // One rank has received as much as all of its own values.
            if bytes as u64 * world_size as u64 > 1 << 31 {
                continue;
            }
            let (time, messages) = time(costs, world_size, OpKind::AllReduce, bytes / 4);
            println!("{world_size:4} ranks {bytes:9} bytes {time:12.1} us {messages:8} messages");
        }
    }
}
