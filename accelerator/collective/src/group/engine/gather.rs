//! Gathers, broadcasts and scatters, in which ranks send their parts to others.

use std::sync::Arc;

use super::{
    OpContext, OpProgress, PREFETCH,
    chunks::{ChunkLayout, ChunkRange, chunk},
    dissemination::HeaderData,
};
use crate::{
    buffer::{Buffer, GatherLayout, gather_layouts_differ},
    element::DType,
    error::Result,
    fingerprint::{CollectiveFingerprint, OpKind},
    shard_layout::{Digest, ShardLayout, shard_layouts_differ},
    transport::{CHUNK, OpPhase},
};

/// An all-gather of the shards of a buffer that can stop wherever it waits for others, and continue later.
///
/// In every round, each rank sends every other one a chunk of its shard, an empty one after the last: the chunks that
/// come in show how far the others are, so a rank is never more than [`PREFETCH`] rounds ahead of what it has received.
#[derive(Debug)]
pub(crate) struct Gathering {
    shards: Arc<ShardLayout>,
    layout: ChunkLayout,
    step: GatheringStep,
}

/// The next step of an all-gather.
#[derive(Clone, Copy, Debug)]
enum GatheringStep {
    Begin,
    Meet,
    /// Takes the chunks of a round from this peer and the next ones.
    Take {
        round: usize,
        peer: usize,
    },
    Done,
}

impl Gathering {
    pub(super) fn new(dtype: DType, shards: &Arc<ShardLayout>) -> Self {
        Self {
            shards: Arc::clone(shards),
            layout: ChunkLayout::Sharded(Arc::clone(shards), dtype.size()),
            step: GatheringStep::Begin,
        }
    }

    /// Advances as far as possible. Every call must pass the same buffer.
    pub(super) fn advance(
        &mut self,
        ctx: &mut OpContext<'_>,
        bytes: &mut [u8],
    ) -> Result<OpProgress> {
        let layout = &self.layout;
        let rounds = layout.rounds();
        loop {
            self.step = match self.step {
                GatheringStep::Begin => {
                    ctx.send_header(|_| self.shards.digest())?;
                    for round in 0..rounds.min(PREFETCH) {
                        ctx.spread(layout, round, bytes)?;
                    }
                    GatheringStep::Meet
                }
                GatheringStep::Meet => {
                    let progress = ctx.try_exchange_headers(|_, _| size_of::<Digest>())?;
                    if progress != OpProgress::Done {
                        return Ok(progress);
                    }
                    if !ctx.agree_on(self.shards.digest()) {
                        return Err(shard_layouts_differ(&ctx.deadline.number));
                    }
                    match rounds {
                        0 => GatheringStep::Done,
                        _ => GatheringStep::Take { round: 0, peer: 0 },
                    }
                }
                GatheringStep::Take { round, mut peer } => {
                    while peer < ctx.world_size {
                        if peer != ctx.rank {
                            let chunk = layout.chunk(peer, round);
                            let awaited = peer..ctx.world_size;
                            let part = ctx.try_receive(
                                peer,
                                awaited.clone(),
                                OpPhase::Gather,
                                round,
                                chunk.len(),
                            )?;
                            let Some(part) = part else {
                                self.step = GatheringStep::Take { round, peer };
                                return Ok(OpProgress::Waiting(awaited));
                            };
                            match chunk {
                                ChunkRange::One(range) => {
                                    bytes[range].copy_from_slice(part.payload.bytes());
                                }
                                ChunkRange::Many(pieces) => {
                                    pieces.unpack(part.payload.bytes(), bytes);
                                }
                            }
                        }
                        peer += 1;
                    }
                    if round + PREFETCH < rounds {
                        ctx.spread(layout, round + PREFETCH, bytes)?;
                    }
                    match round + 1 {
                        round if round == rounds => GatheringStep::Done,
                        round => GatheringStep::Take { round, peer: 0 },
                    }
                }
                GatheringStep::Done => return Ok(OpProgress::Done),
            }
        }
    }
}

impl OpContext<'_> {
    /// Sends this rank's chunk of a round to every other rank.
    fn spread(&mut self, layout: &ChunkLayout, round: usize, bytes: &[u8]) -> Result<()> {
        let mut packed = std::mem::take(self.packed);
        let own = match layout.chunk(self.rank, round) {
            ChunkRange::One(range) => &bytes[range],
            ChunkRange::Many(pieces) => &*pieces.pack(bytes, &mut packed),
        };
        let sent = self
            .ring()
            .try_for_each(|peer| self.send(peer, OpPhase::Gather, round, own));
        *self.packed = packed;
        sent
    }
}

impl OpContext<'_> {
    /// Sends `own` to every rank for which `sends(from, to)` holds, and passes what other ranks send by the same rule
    /// to `sink`, in order for each rank. This is an all-gather if every rank sends to every other one, and a gather or
    /// a broadcast if only one receives or sends.
    pub(crate) fn gather(
        mut self,
        own: &[u8],
        sends: impl Fn(usize, usize) -> bool,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let rank = self.rank;
        if let Some(shm) = self.shm_op() {
            return shm.gather(own, |peer| sends(peer, rank), sink);
        }
        let part = |peer| if sends(rank, peer) { own } else { &[] };
        let len = |peer, header: &CollectiveFingerprint| match sends(peer, rank) {
            true => header.bytes(),
            false => 0,
        };
        match self
            .header_data()
            .is_some_and(|data| self.disseminates(data))
        {
            true => self.begin_rounds(own)?,
            false => self.send_header(|peer| &part(peer)[chunk(part(peer).len(), 0)])?,
        }
        self.exchange_headers(|peer, header| chunk(len(peer, header), 0).len())?;
        let declared = |ctx: &Self, peer: usize| {
            let header = ctx.headers[peer].as_ref();
            header.map_or(0, |header| len(peer, header))
        };
        self.exchange(FirstChunk::InHeader, part, declared, |peer, _, piece| {
            sink(peer, piece);
        })
    }

    /// The data that ranks send, if each sends the same to all, and all know how much.
    fn header_data(&self) -> Option<HeaderData> {
        let bytes = self.deadline.fingerprint.bytes();
        match self.deadline.fingerprint.kind {
            OpKind::AllGather => Some(HeaderData::from_each(bytes, self.world_size)),
            OpKind::Broadcast => Some(HeaderData {
                most: bytes,
                total: bytes,
            }),
            _ => None,
        }
    }

    pub(crate) fn broadcast(self, root: usize, bytes: &mut [u8]) -> Result<()> {
        let from_root = |from, _| from == root;
        if self.rank == root {
            return self.gather(bytes, from_root, |_, _| {});
        }
        let mut filled = 0;
        self.gather(&[], from_root, |_, piece| {
            bytes[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        })
    }

    /// Shows every rank the layout of all, in its own buffers, once everything has come.
    pub(crate) fn all_gather_parts(
        mut self,
        buffers: &mut [&mut Buffer],
        layout: &GatherLayout<'_>,
        sink: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        if let Some(shm) = self.shm_op() {
            return shm.all_gather_parts(buffers, layout, sink);
        }
        let checksum = layout.checksum();
        self.announce(&checksum)?;
        self.exchange_headers(|_, _| checksum.len())?;
        if !self.agree_on(&checksum) {
            return Err(gather_layouts_differ(&self.deadline.number));
        }
        let own = layout.collect(self.rank, buffers);
        let len = |_: &Self, peer| layout.len(peer);
        self.exchange(
            FirstChunk::AfterHeader,
            |_| &own,
            len,
            |peer, at, piece| {
                layout.put(peer, at, piece, buffers);
            },
        )?;
        layout.show(buffers, sink);
        Ok(())
    }

    /// Sends the root's `parts[rank]` to each other rank, and gives the part of this rank to `sink`, in order. On the
    /// other ranks, `parts` are empty.
    pub(crate) fn scatter(
        mut self,
        root: usize,
        parts: &[Vec<u8>],
        mut sink: impl FnMut(&[u8]),
    ) -> Result<()> {
        let (rank, world_size) = (self.rank, self.world_size);
        let part = |peer: usize| parts[peer].as_slice();
        let lens: Vec<[u8; LEN_BYTES]> = (0..world_size)
            .map(|peer| (part(peer).len() as u64).to_le_bytes())
            .collect();
        if let Some(shm) = self.shm_op() {
            // All parts lie in shared memory, after their lengths.
            let mut all = Vec::with_capacity(scatter_len(parts));
            all.extend_from_slice(lens.as_flattened());
            (0..world_size).for_each(|peer| all.extend_from_slice(part(peer)));
            let mut reader = ScatterReader::new(rank, world_size);
            return shm.gather(
                &all,
                |peer| peer == root,
                |_, piece| reader.take(piece, &mut sink),
            );
        }
        self.send_header(|peer| &lens[peer])?;
        self.exchange_headers(|_, _| LEN_BYTES)?;
        let lens: Vec<usize> = self
            .received
            .iter_mut()
            .map(|chunk| {
                chunk
                    .take()
                    .map_or(0, |chunk| read_len(chunk.payload.bytes()))
            })
            .collect();
        let len = |_: &Self, peer: usize| lens[peer];
        self.exchange(FirstChunk::AfterHeader, part, len, |_, _, piece| {
            sink(piece)
        })
    }

    /// Sends `part(rank)` to each other rank, chunk by chunk, and receives `len(rank)` bytes from each. Passes every
    /// received chunk to `sink` with the sender's rank and the chunk's offset, in order for each rank.
    fn exchange<'b>(
        &mut self,
        first: FirstChunk,
        part: impl Fn(usize) -> &'b [u8],
        len: impl Fn(&Self, usize) -> usize,
        mut sink: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let lens = self
            .others()
            .map(|peer| part(peer).len().max(len(self, peer)));
        let rounds = lens.max().unwrap_or(0).div_ceil(CHUNK);
        for round in 0..rounds + PREFETCH {
            for peer in self.ring() {
                let piece = &part(peer)[chunk(part(peer).len(), round)];
                if !piece.is_empty() && (round > 0 || first == FirstChunk::AfterHeader) {
                    self.send(peer, OpPhase::Gather, round, piece)?;
                }
            }
            let Some(round) = round.checked_sub(PREFETCH) else {
                continue;
            };
            for peer in self.others() {
                let range = chunk(len(self, peer), round);
                if !range.is_empty() {
                    let chunk = match self.received[peer].take() {
                        Some(first) => first,
                        None => {
                            self.receive(peer, peer..peer + 1, OpPhase::Gather, round, range.len())?
                        }
                    };
                    sink(peer, range.start, chunk.payload.bytes());
                }
            }
        }
        Ok(())
    }
}

/// The position of an exchange's first chunk, relative to the header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum FirstChunk {
    InHeader,
    AfterHeader,
}

/// Returns the number of bytes that these parts take in shared memory, including the lengths before them.
pub(crate) fn scatter_len(parts: &[Vec<u8>]) -> usize {
    parts.len() * LEN_BYTES + parts.iter().map(Vec::len).sum::<usize>()
}

/// A reader that picks one rank's part out of the parts of all ranks, which come piece by piece after their lengths.
struct ScatterReader {
    rank: usize,
    lens: Vec<u8>,
    header: usize,
    /// The number of bytes of the parts that have gone by.
    passed: usize,
}

impl ScatterReader {
    fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            lens: Vec::new(),
            header: LEN_BYTES * world_size,
            passed: 0,
        }
    }

    /// Takes the next piece of all parts, and passes the bytes that belong to this rank's part to `sink`.
    fn take(&mut self, piece: &[u8], sink: impl FnOnce(&[u8])) {
        let missing = (self.header - self.lens.len()).min(piece.len());
        let (lens, data) = piece.split_at(missing);
        self.lens.extend_from_slice(lens);
        if self.lens.len() < self.header {
            return;
        }
        let mut lens = self.lens.chunks_exact(LEN_BYTES).map(read_len);
        let before: usize = lens.by_ref().take(self.rank).sum();
        let mine = before..before + lens.next().unwrap_or(0);
        let within = |end: usize| end.saturating_sub(self.passed).min(data.len());
        let mine = within(mine.start)..within(mine.end);
        if !mine.is_empty() {
            sink(&data[mine]);
        }
        self.passed += data.len();
    }
}

const LEN_BYTES: usize = size_of::<u64>();

fn read_len(bytes: &[u8]) -> usize {
    let mut len = [0; LEN_BYTES];
    len.copy_from_slice(bytes);
    u64::from_le_bytes(len) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_takes_its_part_however_the_pieces_are_cut() {
        let parts = [vec![1_u8; 3], vec![2; 5], vec![], vec![4; 2]];
        let lens = parts
            .iter()
            .flat_map(|part| (part.len() as u64).to_le_bytes());
        let all: Vec<u8> = lens.chain(parts.concat()).collect();
        for layout in 1..all.len() + 1 {
            for (rank, wanted) in parts.iter().enumerate() {
                let (mut slice, mut part) = (ScatterReader::new(rank, parts.len()), Vec::new());
                all.chunks(layout)
                    .for_each(|piece| slice.take(piece, |mine| part.extend_from_slice(mine)));
                assert_eq!(&part, wanted, "rank {rank}, pieces of {layout}");
            }
        }
    }
}
