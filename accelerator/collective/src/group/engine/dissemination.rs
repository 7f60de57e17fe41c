//! The exchange of headers in rounds, by which a rank of a large world sends few messages.
//!
//! In round k, rank r sends the headers that it has, those of the ranks r to r + 2^k - 1, to rank r - 2^k, and receives as
//! many from rank r + 2^k. After ⌈log₂ n⌉ rounds, every rank has all n headers and their data (Bruck et al., "Efficient
//! algorithms for all-to-all communications in multiport message-passing systems", 1997: the concatenation).

use accelerator_fault::Point;

use super::{HeaderExchange, OpContext, OpProgress};
use crate::{
    error::{Error, Result},
    fingerprint::{CollectiveFingerprint, OpKind},
    transport::{CHUNK, OpPhase, OpPosition, OutgoingChunk, RecvChunk},
};

/// The sizes of the data that are sent with headers, in bytes. All ranks that agree have the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeaderData {
    /// The data of the rank that sends the most.
    pub(super) most: usize,
    /// The data of all ranks together.
    pub(super) total: usize,
}

impl HeaderData {
    pub(super) fn from_each(bytes: usize, world_size: usize) -> Self {
        Self {
            most: bytes,
            total: bytes.saturating_mul(world_size),
        }
    }
}

impl OpContext<'_> {
    /// Sends this operation's header with data to every rank. The data of all ranks have the same length.
    pub(super) fn announce(&mut self, payload: &[u8]) -> Result<()> {
        let data = HeaderData::from_each(payload.len(), self.world_size);
        match self.disseminates(data) {
            true => self.begin_rounds(payload),
            false => self.send_header(|_| payload),
        }
    }

    /// Returns `true` if headers are exchanged in rounds.
    ///
    /// Rounds rely on heartbeats to find the rank that blocks a chain of waits. Heartbeats report waits only for operations
    /// of the world, and start only once the group is connected; other operations send headers directly.
    pub(super) fn disseminates(&self, data: HeaderData) -> bool {
        self.world_size >= MIN_RANKS
            && self.transport.subset().is_none()
            && self.deadline.fingerprint.kind != OpKind::Connect
            && data.most <= MAX_DATA
            && data.total <= MAX_TOTAL
    }

    /// Declares the operation with the first round.
    pub(super) fn begin_rounds(&mut self, payload: &[u8]) -> Result<()> {
        let fingerprint = self.deadline.fingerprint;
        self.keep_header(self.rank, fingerprint, payload);
        *self.exchange = HeaderExchange::Round(0);
        self.send_round(0)?;
        self.inject_fault(Point::Operation(self.deadline.number.sequence))
    }

    /// Takes the rounds that have come, and sends those that follow.
    ///
    /// A rank that calls another operation may send its header directly, and takes no part in the rounds. So a rank
    /// that finds such a header sends its own one to everyone, too: all ranks then find the disagreement.
    pub(super) fn try_exchange_rounds(&mut self) -> Result<OpProgress> {
        while let HeaderExchange::Round(round) = *self.exchange {
            let distance = 1 << round;
            if distance >= self.world_size {
                self.received[self.rank] = None;
                *self.exchange = HeaderExchange::Direct;
                break;
            }
            let from = (self.rank + distance) % self.world_size;
            let Some(chunk) = self.fetch_round(from)? else {
                if *self.exchange == HeaderExchange::Direct {
                    break;
                }
                return Ok(OpProgress::Waiting(from..from + 1));
            };
            let wanted = self.tag(OpPhase::Header, round as usize + 1);
            if chunk.tag != wanted {
                return Err(self.unexpected(from, &chunk, wanted));
            }
            if self.take_blocks(from, &chunk)? == 0 {
                return Err(self.unreadable(from));
            }
            let mut ranks = self.block_ranks(from, distance);
            if ranks.any(|rank| self.headers[rank].is_none()) {
                continue;
            }
            *self.exchange = HeaderExchange::Round(round + 1);
            self.inject_fault(Point::Within(self.deadline.number.sequence))?;
            self.send_round(round + 1)?;
        }
        Ok(OpProgress::Done)
    }

    /// Fetches the round of a rank; `None` if an operation that is resumed has to wait, or the rounds have ended.
    fn fetch_round(&mut self, from: usize) -> Result<Option<RecvChunk>> {
        let (inbox, peers) = (self.transport.inbox(), self.transport.peers());
        let direct = self.tag(OpPhase::Header, 0);
        let member = self.transport.member(from);
        loop {
            let version = inbox.version();
            let position = self.position.unwrap_or(OpPosition::First);
            match inbox.poll(member, position, peers, self.deadline)? {
                Some(chunk) if chunk.tag == direct => {
                    self.take_header(from, chunk)?;
                    self.end_rounds()?;
                    return Ok(None);
                }
                Some(chunk) => return Ok(Some(chunk)),
                None if inbox.has_chunk(direct) => {
                    self.end_rounds()?;
                    return Ok(None);
                }
                None if self.position.is_some() => return Ok(None),
                None => {}
            }
            inbox.wait_for_event(version, from..from + 1, self.transport, self.deadline)?;
        }
    }

    /// Sends this rank's header directly, since some rank takes no part in the rounds.
    fn end_rounds(&mut self) -> Result<()> {
        *self.exchange = HeaderExchange::Direct;
        let own = self.received[self.rank].take();
        let payload = own.as_ref().map_or(&[][..], |own| own.payload.bytes());
        self.send_header(|_| payload)
    }

    /// Sends a round, if there is one of that number, in as many frames as it takes.
    fn send_round(&mut self, round: u32) -> Result<()> {
        let distance = 1 << round;
        if distance >= self.world_size {
            return Ok(());
        }
        let to = (self.rank + self.world_size - distance) % self.world_size;
        let own = self.deadline.fingerprint;
        let tag = self.tag(OpPhase::Header, round as usize + 1);
        let empty = OutgoingChunk {
            tag,
            fingerprint: Some(&own),
            payload: &[],
        };
        self.blocks.clear();
        for (index, rank) in self.block_ranks(self.rank, distance).enumerate() {
            // What this rank sends in a round, it has received in those before.
            let (Some(header), Some(chunk)) = (&self.headers[rank], &self.received[rank]) else {
                continue;
            };
            let (encoded, len) = match *header == own {
                true => ([0; CollectiveFingerprint::BOUND], 0),
                false => header.encode(),
            };
            let (head, payload) = (&encoded[..len], chunk.payload.bytes());
            if self.blocks.len() + MAX_BLOCK_HEAD + payload.len() > CHUNK {
                let part = OutgoingChunk {
                    payload: self.blocks,
                    ..empty
                };
                self.transport.send(to, part, self.deadline)?;
                self.blocks.clear();
            }
            if self.blocks.is_empty() {
                // A world size fits 32 bits.
                self.blocks.extend((index as u32).to_le_bytes());
            }
            // Both are bounded by a frame.
            self.blocks.extend((head.len() as u16).to_le_bytes());
            self.blocks.extend((payload.len() as u32).to_le_bytes());
            self.blocks.extend(head);
            self.blocks.extend(payload);
        }
        let part = OutgoingChunk {
            payload: self.blocks,
            ..empty
        };
        self.transport.send(to, part, self.deadline)
    }

    /// Keeps the headers that a peer has sent in a frame of a round, and returns how many were new.
    pub(super) fn take_blocks(&mut self, from: usize, chunk: &RecvChunk) -> Result<usize> {
        self.try_take_blocks(from, chunk)
            .ok_or_else(|| self.unreadable(from))
    }

    fn try_take_blocks(&mut self, from: usize, chunk: &RecvChunk) -> Option<usize> {
        let sender = chunk.fingerprint?;
        let distance = 1_usize.checked_shl(chunk.tag.index.checked_sub(1)?)?;
        if distance >= self.world_size || (self.rank + distance) % self.world_size != from {
            return None;
        }
        let (first, mut rest) = chunk.payload.bytes().split_first_chunk()?;
        let first = u32::from_le_bytes(*first) as usize;
        let mut ranks = self.block_ranks(from, distance).skip(first);
        let mut new = 0;
        while !rest.is_empty() {
            let rank = ranks.next()?;
            let (head_len, after) = rest.split_first_chunk()?;
            let (payload_len, after) = after.split_first_chunk()?;
            let (head, after) = after.split_at_checked(u16::from_le_bytes(*head_len).into())?;
            let payload_len = u32::from_le_bytes(*payload_len) as usize;
            if payload_len > MAX_DATA {
                // This rank could not forward it.
                return None;
            }
            let (payload, after) = after.split_at_checked(payload_len)?;
            rest = after;
            let header = match head {
                [] => sender,
                head => CollectiveFingerprint::decode(head)?,
            };
            if self.headers[rank].is_none() {
                self.keep_header(rank, header, payload);
                new += 1;
            }
        }
        Some(new)
    }

    pub(super) fn unreadable(&self, from: usize) -> Error {
        self.deadline.protocol(
            self.transport.peer(from),
            "it sent headers of several ranks that cannot be read",
        )
    }

    fn keep_header(&mut self, rank: usize, header: CollectiveFingerprint, payload: &[u8]) {
        let mut kept = self.transport.inbox().chunk(payload.len());
        kept.bytes_mut().copy_from_slice(payload);
        self.received[rank] = Some(RecvChunk {
            tag: self.tag(OpPhase::Header, 0),
            fingerprint: None,
            payload: kept,
        });
        self.note_header(rank, header);
    }

    /// The ranks whose headers `from` sends to the rank `distance` before it, which has the others already.
    fn block_ranks(&self, from: usize, distance: usize) -> impl Iterator<Item = usize> + use<> {
        let world_size = self.world_size;
        let count = distance.min(world_size - distance);
        (from..from + count).map(move |rank| rank % world_size)
    }
}

/// The fewest ranks that exchange headers in rounds. With fewer, sending directly is faster, since rounds wait for one
/// another.
const MIN_RANKS: usize = 16;

/// The most data of a rank that travel in rounds. Copying more of them at every hop costs more than a message of its own to
/// each rank.
const MAX_DATA: usize = 8 * 1024;
const _: () = assert!(FRAME_HEAD + MAX_BLOCK_HEAD + MAX_DATA <= CHUNK);

/// The most data of all ranks together that travel in rounds: each rank holds all of them.
const MAX_TOTAL: usize = 4 * CHUNK;

/// The bytes of a frame before its blocks.
const FRAME_HEAD: usize = size_of::<u32>();

/// The most bytes of a block besides the data that came with the header.
const MAX_BLOCK_HEAD: usize = size_of::<u16>() + size_of::<u32>() + CollectiveFingerprint::BOUND;
