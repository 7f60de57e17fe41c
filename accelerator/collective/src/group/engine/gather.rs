//! Gathers and broadcasts: each rank sends what it has.

use super::{OpContext, PREFETCH, chunks::chunk};
use crate::{
    buffer::Buffer,
    buffer_slice::{GatherLayout, gather_layouts_differ},
    error::Result,
    fingerprint::CollectiveFingerprint,
    transport::{CHUNK, Stage},
};

impl OpContext<'_> {
    /// Sends `own` to every rank and gives what the others sent to `sink`, in order for each
    /// rank.
    pub(crate) fn all_gather(
        mut self,
        own: &[u8],
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.all_gather(own, sink);
        }
        self.send_header(|_| &own[chunk(own.len(), 0)])?;
        self.exchange_headers(|_, fingerprint| chunk(fingerprint.bytes(), 0).len())?;
        let longest = self
            .headers
            .iter()
            .flatten()
            .map(CollectiveFingerprint::bytes)
            .max();
        let rounds = longest.unwrap_or(0).div_ceil(CHUNK);
        for round in 1..PREFETCH {
            self.broadcast_chunk(round, &own[chunk(own.len(), round)])?;
        }
        for round in 0..rounds {
            let next = chunk(own.len(), round + PREFETCH);
            self.broadcast_chunk(round + PREFETCH, &own[next])?;
            for peer in self.others() {
                let len = self.declared_chunk(peer, round).len();
                if len > 0 {
                    let chunk = self.round(peer, Stage::Outward, round, len)?;
                    sink(peer, chunk.payload.bytes());
                }
            }
        }
        Ok(())
    }

    /// Shows every rank the layout of all, in its own buffers, once everything has come.
    pub(crate) fn all_gather_parts(
        mut self,
        buffers: &mut [&mut Buffer],
        layout: &GatherLayout<'_>,
        sink: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.all_gather_parts(buffers, layout, sink);
        }
        let digest = layout.digest();
        self.send_header(|_| digest)?;
        self.exchange_headers(|_, _| digest.len())?;
        if !self.agree_on(digest) {
            return Err(gather_layouts_differ(self.deadline.sequence));
        }
        let own = layout.collect(self.rank, buffers);
        for round in 0..PREFETCH {
            self.broadcast_chunk(round + 1, &own[chunk(own.len(), round)])?;
        }
        for round in 0..layout.longest().div_ceil(CHUNK) {
            let next = round + PREFETCH;
            self.broadcast_chunk(next + 1, &own[chunk(own.len(), next)])?;
            for peer in self.others() {
                let range = chunk(layout.len(peer), round);
                if !range.is_empty() {
                    let stage = Stage::Outward;
                    let chunk =
                        self.receive(peer, peer..peer + 1, stage, round + 1, range.len())?;
                    layout.put(peer, range.start, chunk.payload.bytes(), buffers);
                }
            }
        }
        layout.show(buffers, sink);
        Ok(())
    }

    /// Sends `own` to the root, and there gives what the others sent to `sink`, in order for
    /// each rank.
    pub(crate) fn gather(
        mut self,
        root: usize,
        own: &[u8],
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.gather(root, own, sink);
        }
        let rank = self.rank;
        self.send_header(|peer| match peer == root {
            true => &own[chunk(own.len(), 0)],
            false => &[],
        })?;
        self.exchange_headers(|_, fingerprint| match rank == root {
            true => chunk(fingerprint.bytes(), 0).len(),
            false => 0,
        })?;
        if rank != root {
            for round in 1..own.len().div_ceil(CHUNK) {
                self.send(root, Stage::Inward, round, &own[chunk(own.len(), round)])?;
            }
            return Ok(());
        }
        for peer in self.others() {
            let mut round = 0;
            loop {
                let len = self.declared_chunk(peer, round).len();
                if len == 0 {
                    break;
                }
                let chunk = self.round(peer, Stage::Inward, round, len)?;
                sink(peer, chunk.payload.bytes());
                round += 1;
            }
        }
        Ok(())
    }

    /// Sends the root's `bytes` to every rank.
    pub(crate) fn broadcast(self, root: usize, bytes: &mut [u8]) -> Result<()> {
        if self.rank == root {
            return self.broadcast_from(root, bytes);
        }
        let mut filled = 0;
        self.broadcast_to(root, |piece| {
            bytes[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        })
    }

    /// The root's header of a broadcast.
    pub(crate) fn broadcast_from(mut self, root: usize, bytes: &[u8]) -> Result<()> {
        debug_assert_eq!(self.rank, root, "only the root has something to say");
        if let Some(steps) = self.steps() {
            return steps.broadcast_from(bytes);
        }
        self.send_header(|_| &bytes[chunk(bytes.len(), 0)])?;
        self.exchange_headers(|_, _| 0)?;
        for round in 1..bytes.len().div_ceil(CHUNK) {
            self.broadcast_chunk(round, &bytes[chunk(bytes.len(), round)])?;
        }
        Ok(())
    }

    /// Every other rank's header of a broadcast: gives what the root sent to `sink`, in order.
    pub(crate) fn broadcast_to(mut self, root: usize, mut sink: impl FnMut(&[u8])) -> Result<()> {
        if let Some(steps) = self.steps() {
            return steps.broadcast_to(root, sink);
        }
        self.send_header(|_| &[])?;
        self.exchange_headers(|peer, fingerprint| match peer == root {
            true => chunk(fingerprint.bytes(), 0).len(),
            false => 0,
        })?;
        let mut round = 0;
        loop {
            let len = self.declared_chunk(root, round).len();
            if len == 0 {
                return Ok(());
            }
            let chunk = self.round(root, Stage::Outward, round, len)?;
            sink(chunk.payload.bytes());
            round += 1;
        }
    }

    /// The root's header of a scatter: sends each rank its part, and nothing of the others'.
    pub(crate) fn scatter_from(mut self, parts: &[Vec<u8>]) -> Result<()> {
        let lens: Vec<_> = parts
            .iter()
            .map(|part| (part.len() as u64).to_le_bytes())
            .collect();
        if let Some(steps) = self.steps() {
            // Where memory is shared, all parts lie in it, behind their lengths.
            let lens = lens.as_flattened().iter().copied();
            let all: Vec<u8> = lens.chain(parts.concat()).collect();
            return steps.scatter_from(&all);
        }
        self.send_header(|peer| &lens[peer])?;
        self.exchange_headers(|_, _| 0)?;
        let longest = parts.iter().map(Vec::len).max().unwrap_or(0);
        for round in 0..longest.div_ceil(CHUNK) {
            for peer in self.ring() {
                let piece = &parts[peer][chunk(parts[peer].len(), round)];
                if !piece.is_empty() {
                    self.send(peer, Stage::Outward, round + 1, piece)?;
                }
            }
        }
        Ok(())
    }

    /// Every other rank's header of a scatter: its part.
    pub(crate) fn scatter_to(mut self, root: usize) -> Result<Vec<u8>> {
        let (rank, world_size) = (self.rank, self.world_size);
        let mut part = Vec::new();
        if let Some(steps) = self.steps() {
            let mut slice = ScatterReader::new(rank, world_size);
            steps.scatter_to(root, |piece| {
                slice.take(piece, |mine| part.extend_from_slice(mine))
            })?;
            return Ok(part);
        }
        self.send_header(|_| &[])?;
        self.exchange_headers(|peer, _| match peer == root {
            true => LEN,
            false => 0,
        })?;
        let first = self.round(root, Stage::Begin, 0, LEN)?;
        let len = read_len(first.payload.bytes());
        for round in 0..len.div_ceil(CHUNK) {
            let expected = chunk(len, round).len();
            let chunk = self.receive(root, root..root + 1, Stage::Outward, round + 1, expected)?;
            part.extend_from_slice(chunk.payload.bytes());
        }
        Ok(part)
    }
}

impl OpContext<'_> {
    /// Sends `parts[rank]` to each other rank, and gives what the others sent to this one to `sink`, in order for
    /// each rank.
    pub(crate) fn all_to_all(
        mut self,
        parts: &[&[u8]],
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let (rank, world_size) = (self.rank, self.world_size);
        let lens: Vec<[u8; LEN]> = parts
            .iter()
            .map(|part| (part.len() as u64).to_le_bytes())
            .collect();
        if let Some(op) = self.steps() {
            let all = [lens.as_flattened(), &parts.concat()].concat();
            let mut readers: Vec<ScatterReader> = (0..world_size)
                .map(|_| ScatterReader::new(rank, world_size))
                .collect();
            return op.all_gather(&all, |peer, piece| {
                readers[peer].take(piece, |mine| sink(peer, mine));
            });
        }
        self.send_header(|peer| &lens[peer])?;
        self.exchange_headers(|_, _| LEN)?;
        let mut expected = vec![0; world_size];
        for peer in self.others() {
            let first = self.round(peer, Stage::Begin, 0, LEN)?;
            expected[peer] = read_len(first.payload.bytes());
        }
        let longest = parts
            .iter()
            .map(|part| part.len())
            .chain(expected.iter().copied());
        let rounds = longest.max().unwrap_or(0).div_ceil(CHUNK);
        for round in 0..rounds + PREFETCH {
            self.send_parts(parts, round)?;
            let Some(round) = round.checked_sub(PREFETCH) else {
                continue;
            };
            for peer in self.others() {
                let len = chunk(expected[peer], round).len();
                if len > 0 {
                    let chunk =
                        self.receive(peer, peer..peer + 1, Stage::Inward, round + 1, len)?;
                    sink(peer, chunk.payload.bytes());
                }
            }
        }
        Ok(())
    }

    /// Sends each other rank its chunk of this round.
    fn send_parts(&mut self, parts: &[&[u8]], round: usize) -> Result<()> {
        for peer in self.ring() {
            let piece = &parts[peer][chunk(parts[peer].len(), round)];
            if !piece.is_empty() {
                self.send(peer, Stage::Inward, round + 1, piece)?;
            }
        }
        Ok(())
    }
}

/// The part of one rank in the parts of all, which come piece by piece, behind their lengths.
struct ScatterReader {
    rank: usize,
    lens: Vec<u8>,
    /// The bytes of the lengths.
    header: usize,
    /// How many bytes of the parts have gone by.
    passed: usize,
}

impl ScatterReader {
    fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            lens: Vec::new(),
            header: LEN * world_size,
            passed: 0,
        }
    }

    /// Takes the next piece of all parts, and gives what it has of this rank's part to `sink`.
    fn take(&mut self, piece: &[u8], sink: impl FnOnce(&[u8])) {
        let missing = (self.header - self.lens.len()).min(piece.len());
        let (lens, data) = piece.split_at(missing);
        self.lens.extend_from_slice(lens);
        if self.lens.len() < self.header {
            return;
        }
        let mut lens = self.lens.chunks_exact(LEN).map(read_len);
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

/// The bytes of a length.
const LEN: usize = size_of::<u64>();

fn read_len(bytes: &[u8]) -> usize {
    let mut len = [0; LEN];
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
