//! Entry points for fuzz targets (see `fuzz/`). No part of the interface.
//!
//! A target fails if it panics, uses unbounded memory, or never ends. A correct stream that was damaged must also give
//! an error or the right sums.

use std::{
    io::{Cursor, Read},
    ops::Range,
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use accelerator_host::sync::Mutex;

use crate::element::{DType, ReduceOp};
use crate::error::Result;
use crate::group::{GroupOptions, ProcessGroup};
use crate::shard_layout::ShardLayout;
use crate::topology::{Topology, TransportKind};
use crate::transport::{
    ControlPlane, DataPlane, FinalMessage, Inbox, OpDeadline, OutgoingChunk, Peer, PeerLocation,
    Poller, Transport, feed,
};
use crate::wire::message::{MAX_SHORT_BYTES, MAX_TABLE_BYTES, Message, RankTable, Registration};
use crate::wire::{FrameKind, Head, MAX_PREAMBLE, from_bytes};

/// Gives bytes to a rank, as if its peer had sent them over an open connection.
///
/// If the first byte is even, it chooses how many frames of a correct stream come before the rest. If it is odd, the
/// rest says how a correct stream is damaged.
pub fn frames(bytes: &[u8]) {
    let Some((mode, bytes)) = bytes.split_first() else {
        return;
    };
    let correct = correct();
    if mode % 2 == 0 {
        let kept = usize::from(mode / 2) % (correct.len() + 1);
        let mut stream = correct[..kept].concat();
        stream.extend_from_slice(bytes);
        // Any sums are right here: the peer may send anything.
        let _ = receive(Cursor::new(stream));
        return;
    }
    let mut frames = correct.to_vec();
    for damage in bytes.chunks_exact(4).take(3) {
        damage_frames(&mut frames, [damage[0], damage[1], damage[2], damage[3]]);
    }
    for (found, expected) in receive(Cursor::new(frames.concat())).iter().zip(expected()) {
        if let Ok(found) = found {
            assert!(found == expected, "a damaged stream gave a wrong sum");
        }
    }
}

/// Reads bytes as rendezvous messages, from unknown processes and from the store.
pub fn messages(bytes: &[u8]) {
    for bound in [MAX_SHORT_BYTES, MAX_TABLE_BYTES] {
        let mut rest = Cursor::new(bytes);
        while let Ok(message) = Message::read(&mut rest, bound) {
            if let Message::Register { body, .. } | Message::Welcome { body, .. } = message {
                let _ = from_bytes::<Registration>(&body);
                let _ = from_bytes::<RankTable>(&body);
            }
        }
    }
    let _ = from_bytes::<Message>(bytes);
    let _ = from_bytes::<Registration>(bytes);
    let _ = from_bytes::<RankTable>(bytes);
}

/// The lengths of three operations: one that is a single frame, one with a part for each rank, and one whose parts are
/// cut. The same number of operations follow, in which each rank keeps every other block.
const LENGTHS: [usize; 3] = [3, 5000, 140_000];

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|index| (rank * 1000 + index % 100) as f32)
        .collect()
}

fn expected() -> &'static [Vec<f32>] {
    static SUMS: OnceLock<Vec<Vec<f32>>> = OnceLock::new();
    SUMS.get_or_init(|| {
        let sums = LENGTHS.map(|len| {
            let both = values(0, len).into_iter().zip(values(1, len));
            both.map(|(a, b)| a + b).collect::<Vec<f32>>()
        });
        let kept = sums.clone().map(|sums| kept(0, &sums));
        sums.into_iter().chain(kept).collect()
    })
}

fn reduce(group: &ProcessGroup) -> Vec<Result<Vec<f32>>> {
    let sums = LENGTHS.map(|len| {
        let mut values = values(group.rank(), len);
        let reduced = group.all_reduce(&mut values, ReduceOp::Sum);
        reduced.map(|()| values)
    });
    let kept = LENGTHS.map(|len| {
        let mut buffer = group.buffer(DType::F32, len);
        buffer
            .as_mut_slice()?
            .copy_from_slice(&values(group.rank(), len));
        let layout = ShardLayout::new(len, [0, 1].map(|rank| blocks(rank, len)).into())?;
        group.reduce_scatter_buffer(&mut buffer, ReduceOp::Sum, &Arc::new(layout))?;
        Ok(kept(group.rank(), buffer.as_slice()?))
    });
    sums.into_iter().chain(kept).collect()
}

fn blocks(rank: usize, len: usize) -> Vec<Range<usize>> {
    let starts = (rank * RUN_LEN..len).step_by(2 * RUN_LEN);
    starts
        .map(|start| start..len.min(start + RUN_LEN))
        .collect()
}

fn kept(rank: usize, values: &[f32]) -> Vec<f32> {
    let blocks = blocks(rank, values.len()).into_iter();
    blocks.flat_map(|block| values[block].to_vec()).collect()
}

const RUN_LEN: usize = 1000;

/// The results of rank 0 for a stream from rank 1.
fn receive(stream: impl Read + Send) -> Vec<Result<Vec<f32>>> {
    let (wire, _) = FuzzWire::new(0);
    let (inbox, peer) = (Arc::clone(&wire.inbox), wire.peers[1].clone());
    thread::scope(|scope| {
        scope.spawn(move || feed(stream, peer, inbox));
        match join(0, wire) {
            Ok(group) => reduce(&group),
            Err(_) => Vec::new(),
        }
    })
}

fn join(rank: usize, wire: FuzzWire) -> Result<ProcessGroup> {
    let options = GroupOptions::new().with_progress_timeout(Duration::from_secs(20));
    let topology = Topology::new(rank, 2)?;
    let (peers, inbox) = (Arc::clone(&wire.peers), Arc::clone(&wire.inbox));
    let wire = Arc::new(wire);
    let control: Arc<dyn ControlPlane> = wire.clone();
    let transport = Transport::new(peers, inbox, control, Some(wire));
    ProcessGroup::join(topology, &options, transport, None, None)
}

/// The frames that rank 1 sends when all goes well.
fn correct() -> &'static [Vec<u8>] {
    static FRAMES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FRAMES.get_or_init(|| {
        let (left, from_left) = FuzzWire::new(0);
        let (right, from_right) = FuzzWire::new(1);
        let ends = [(left, from_right), (right, from_left)];
        let recorded = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for (rank, (wire, frames)) in ends.into_iter().enumerate() {
                let (inbox, peer) = (Arc::clone(&wire.inbox), wire.peers[1 - rank].clone());
                let source = Tape {
                    frames,
                    current: Cursor::default(),
                    recorded: (rank == 0).then_some(&recorded),
                };
                scope.spawn(move || feed(source, peer, inbox));
                scope.spawn(move || {
                    let group = join(rank, wire)?;
                    drop(reduce(&group));
                    group.close()
                });
            }
        });
        recorded.into_inner()
    })
}

/// Damages a stream of frames: what, in which frame, and where.
fn damage_frames(frames: &mut Vec<Vec<u8>>, [what, frame, high, low]: [u8; 4]) {
    if frames.is_empty() {
        return;
    }
    let frame = usize::from(frame) % frames.len();
    let place = usize::from(high) * 256 + usize::from(low);
    match what % 6 {
        0 => {
            let bits = frames[frame].len() * 8;
            let bit = place % bits.max(1);
            if let Some(byte) = frames[frame].get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
        }
        1 => {
            let len = place % (frames[frame].len() + 1);
            frames[frame].truncate(len);
            frames.truncate(frame + 1);
        }
        2 => {
            let twice = frames[frame].clone();
            frames.insert(place % (frames.len() + 1), twice);
        }
        3 => {
            let other = place % frames.len();
            frames.swap(frame, other);
        }
        4 => drop(frames.remove(frame)),
        _ => {
            // Lengths out of bounds, under a correct seal.
            if let Some(head) = frames[frame].get_mut(..Head::LEN) {
                let (field, value) = match low % 2 {
                    0 => (20, MAX_PREAMBLE as u32 + 1 + u32::from(high)),
                    _ => (24, u32::MAX - u32::from(high)),
                };
                head[field..field + 4].copy_from_slice(&value.to_le_bytes());
                let seal = crc32fast::hash(&head[..32]);
                head[32..36].copy_from_slice(&seal.to_le_bytes());
            }
        }
    }
}

/// A transport whose frames go to whoever holds the other end.
#[derive(Debug)]
struct FuzzWire {
    peers: Arc<[Peer]>,
    inbox: Arc<Inbox>,
    // In a mutex so that the transport can be shared.
    sent: Mutex<Sender<Vec<u8>>>,
}

impl FuzzWire {
    fn new(rank: usize) -> (Self, Receiver<Vec<u8>>) {
        let (sender, frames) = channel();
        let peers = (0..2).map(|peer| Peer {
            rank: peer,
            location: PeerLocation::Process {
                host: "fuzz".to_owned(),
                pid: (10 * rank + peer) as u32,
            },
        });
        let wire = Self {
            peers: peers.collect(),
            inbox: Arc::new(Inbox::new(2)),
            sent: Mutex::new(sender),
        };
        (wire, frames)
    }

    fn push(&self, head: Head, preamble: &[u8], payload: &[u8]) {
        let sent = self.sent.lock();
        // If the peer is a stream that was written before, nobody receives frames.
        let _ = sent.send([&head.encode()[..], preamble, payload].concat());
    }
}

impl DataPlane for FuzzWire {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn send(
        &self,
        _: usize,
        chunk: OutgoingChunk<'_>,
        _: &mut OpDeadline,
        _: Option<&Poller>,
    ) -> Result<()> {
        let encoded = chunk.fingerprint.map(|fingerprint| fingerprint.encode());
        let preamble = match &encoded {
            Some((bytes, len)) => &bytes[..*len],
            None => &[],
        };
        let head = chunk.head(preamble);
        self.push(head, preamble, chunk.payload);
        Ok(())
    }

    fn wait_for_arrival(&self, version: u64, due: Instant, _: Option<&Poller>) {
        self.inbox.sleep(version, due);
    }
}

impl ControlPlane for FuzzWire {
    fn leave(&self, leave: &FinalMessage) {
        self.inbox.close();
        if let FinalMessage::Goodbye(_) = leave {
            self.push(Head::new(FrameKind::Goodbye, 0, 0, &[], &[]), &[], &[]);
        }
    }

    fn last_activity(&self, rank: usize) -> Option<Instant> {
        self.inbox.active(rank)
    }
}

/// Frames as they come, one after the other.
struct Tape<'a> {
    frames: Receiver<Vec<u8>>,
    current: Cursor<Vec<u8>>,
    recorded: Option<&'a Mutex<Vec<Vec<u8>>>>,
}

impl Read for Tape<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.current.read(buffer)? {
                0 if !buffer.is_empty() => {}
                count => return Ok(count),
            }
            let Ok(frame) = self.frames.recv() else {
                return Ok(0);
            };
            if let Some(recorded) = self.recorded {
                let mut recorded = recorded.lock();
                recorded.push(frame.clone());
            }
            self.current = Cursor::new(frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undamaged_stream_gives_the_right_sums() {
        let found = receive(Cursor::new(correct().concat()));
        let found: Vec<_> = found.into_iter().map(|sums| sums.unwrap()).collect();
        assert_eq!(found, expected());
        assert!(correct().len() >= 7, "{} frames", correct().len());
    }

    /// A few thousand inputs of each kind, so that the targets are known to work without a fuzzer.
    #[test]
    fn damaged_streams_never_give_wrong_sums() {
        let mut state = 1_u64;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        };
        for round in 0..500 {
            let len = 1 + round % 40;
            let bytes: Vec<u8> = (0..len).map(|_| next()).collect();
            frames(&bytes);
            messages(&bytes);
        }
    }
}
