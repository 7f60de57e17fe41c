//! Reads the frames of one peer, as far as they have arrived, and records when it was heard.

use std::io::{self, IoSliceMut, Read};
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::peer_liveness::PeerLiveness;
use crate::error::Certainty;
use crate::fingerprint::CollectiveFingerprint;
use crate::transport::chunk::PooledBuffer;
use crate::transport::{Abort, Inbox, LeaveKind, OpPhase, RecvChunk, Tag};
use crate::wire::{FrameError, FrameKind, Head, Heartbeat, MAX_PREAMBLE, ReadError};

/// The receiving side of one connection. It never waits where its source does not, and can stop
/// within a frame: whichever thread comes next continues from there.
#[derive(Debug)]
pub(super) struct FrameReader<S> {
    source: S,
    rank: usize,
    inbox: Arc<Inbox>,
    liveness: Arc<PeerLiveness>,
    /// Bytes that were read, of which those in `from..to` have not been taken; empty between calls if there are none.
    stage: Box<[u8]>,
    stages: Arc<Stages>,
    from: usize,
    to: usize,
    preamble: Vec<u8>,
    body: Option<PartialFrame>,
    is_full: bool,
    /// The peer broke the protocol: what it sends is read, and not looked at.
    discarding: bool,
    has_ended: bool,
}

/// The outcome of one call to the reader.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReadOutcome {
    /// Frames were delivered, or not every connection was tried; there may be more.
    Frames,
    /// There was only a part of a frame, or nothing at all.
    Nothing,
    /// The peer's queue in the inbox is full: nothing is read before there is room.
    Full,
    Ended,
}

impl ReadOutcome {
    /// Merges the outcomes of two peers: the one that needs attention first wins.
    pub(super) fn merge(self, other: Self) -> Self {
        match (self, other) {
            (Self::Frames, _) | (_, Self::Frames) => Self::Frames,
            (Self::Full, _) | (_, Self::Full) => Self::Full,
            (Self::Nothing, _) | (_, Self::Nothing) => Self::Nothing,
            (Self::Ended, Self::Ended) => Self::Ended,
        }
    }
}

#[derive(Debug)]
struct PartialFrame {
    head: Head,
    chunk: PooledBuffer,
    filled: usize,
}

/// [Reads frames](FrameReader::read_frames) from a reader that threads share, then calls `on_read` with the reader still
/// locked. A thread that panics within a frame leaves the reader inconsistent; the next call then ends the group.
pub(super) fn read_frames<S: Read>(
    reader: &Mutex<FrameReader<S>>,
    on_read: impl FnOnce(&FrameReader<S>),
) -> ReadOutcome {
    let (mut reader, is_consistent) = match reader.lock() {
        Ok(reader) => (reader, true),
        Err(poisoned) => (poisoned.into_inner(), false),
    };
    let outcome = match is_consistent {
        true => reader.read_frames(),
        false => reader.end_inconsistent(),
    };
    on_read(&reader);
    outcome
}

/// Returns `true` if a reader that threads share can accept more bytes.
pub(super) fn is_open<S>(reader: &Mutex<FrameReader<S>>) -> bool {
    let reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
    !reader.is_full() && !reader.has_ended()
}

impl<S> FrameReader<S> {
    /// Returns `true` if the peer's queue in the inbox was full. Complete frames may then be buffered here.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// Returns `true` if the peer's queue was full, and has room now.
    #[cfg(target_os = "linux")]
    pub(super) fn can_continue(&self) -> bool {
        self.is_full && self.inbox.has_room(self.rank, Duration::ZERO)
    }

    /// Returns `true` if the connection has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }
}

impl<S: Read> FrameReader<S> {
    pub(super) fn new(
        source: S,
        rank: usize,
        inbox: Arc<Inbox>,
        liveness: Arc<PeerLiveness>,
        stages: Arc<Stages>,
    ) -> Self {
        Self {
            source,
            rank,
            inbox,
            liveness,
            stage: Box::default(),
            stages,
            from: 0,
            to: 0,
            preamble: Vec::new(),
            body: None,
            is_full: false,
            discarding: false,
            has_ended: false,
        }
    }

    /// Delivers the next frame to the inbox, and those that were read along with it: what a
    /// thread leaves behind is never a whole frame, so that whoever waits for bytes misses none.
    /// Only where the peer's queue gets full do whole frames stay: whoever makes room there reads
    /// before it waits for bytes.
    pub(super) fn read_frames(&mut self) -> ReadOutcome {
        if self.has_ended {
            return ReadOutcome::Ended;
        }
        if self.stage.is_empty() {
            self.stage = self.stages.take();
        }
        let outcome = self.read_staged();
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
            self.stages.give_back(mem::take(&mut self.stage));
        }
        outcome
    }

    fn read_staged(&mut self) -> ReadOutcome {
        if self.discarding {
            return self.discard();
        }
        if self.is_full {
            if !self.inbox.has_room(self.rank, Duration::ZERO) {
                return ReadOutcome::Full;
            }
            self.is_full = false;
            self.liveness.resume();
        }
        let mut any = false;
        loop {
            match self.step() {
                Ok(true) if self.is_full => {
                    self.liveness.pause();
                    return ReadOutcome::Frames;
                }
                Ok(true) if self.has_whole() => any = true,
                Ok(true) => return ReadOutcome::Frames,
                Ok(false) if any => return ReadOutcome::Frames,
                Ok(false) => return ReadOutcome::Nothing,
                Err(error) => {
                    self.end(error);
                    return match self.discarding {
                        true => self.discard(),
                        false => ReadOutcome::Ended,
                    };
                }
            }
        }
    }

    /// Takes bytes without a meaning, and not for long. Where they were left unread, the system would
    /// cut off what this rank says last, and the peer would not learn why.
    fn discard(&mut self) -> ReadOutcome {
        for _ in 0..READS {
            match self.source.read(&mut self.stage) {
                Ok(0) => self.has_ended = true,
                Ok(_) => continue,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => break,
                    _ => self.has_ended = true,
                },
            }
            return ReadOutcome::Ended;
        }
        ReadOutcome::Nothing
    }

    /// Ends what cannot be trusted any more.
    fn end_inconsistent(&mut self) -> ReadOutcome {
        if !self.has_ended {
            self.has_ended = true;
            self.inbox.failed(READER_PANICKED);
        }
        ReadOutcome::Ended
    }

    /// Takes one frame, and says whether it was there.
    fn step(&mut self) -> Result<bool, ReadError> {
        loop {
            let Some(body) = &mut self.body else {
                if !self.begin()? && self.read()? == 0 {
                    return Ok(false);
                }
                continue;
            };
            if body.filled < body.chunk.bytes().len() {
                if self.read()? == 0 {
                    return Ok(false);
                }
                continue;
            }
            // It was there.
            if let Some(PartialFrame { head, chunk, .. }) = self.body.take() {
                head.check(&self.preamble, chunk.bytes())?;
                self.deliver(head, chunk)?;
            }
            return Ok(true);
        }
    }

    /// Begins a frame, where its head and preamble have come.
    fn begin(&mut self) -> Result<bool, ReadError> {
        let Some(head) = self.head() else {
            return Ok(false);
        };
        let head = head?;
        let payload = Head::LEN + head.preamble;
        let staged = &self.stage[self.from..self.to];
        let Some(preamble) = staged.get(Head::LEN..payload) else {
            return Ok(false);
        };
        self.preamble.clear();
        self.preamble.extend_from_slice(preamble);
        let mut chunk = self.inbox.chunk(head.payload);
        let filled = head.payload.min(staged.len() - payload);
        chunk.bytes_mut()[..filled].copy_from_slice(&staged[payload..payload + filled]);
        self.from += payload + filled;
        self.body = Some(PartialFrame {
            head,
            chunk,
            filled,
        });
        Ok(true)
    }

    /// The head of the next frame, where it has come.
    fn head(&self) -> Option<Result<Head, FrameError>> {
        let staged = &self.stage[self.from..self.to];
        staged.first_chunk().map(Head::decode)
    }

    /// Returns `true` if a whole frame, or an invalid one, is waiting in memory.
    fn has_whole(&self) -> bool {
        match self.head() {
            Some(Ok(head)) => self.to - self.from >= Head::LEN + head.preamble + head.payload,
            Some(Err(_)) => true,
            None => false,
        }
    }

    /// Reads what is there: the rest of a payload goes straight to its place, what follows to the
    /// stage. Gives the number of bytes; none where there are none at the moment.
    fn read(&mut self) -> Result<usize, ReadError> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 && self.body.is_none() {
            self.stage.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let stage = &mut self.stage[self.to..];
        let mut nothing = [];
        let rest = match &mut self.body {
            Some(body) => &mut body.chunk.bytes_mut()[body.filled..],
            None => &mut nothing[..],
        };
        let missing = rest.len();
        let count = loop {
            let outcome = match missing {
                0 => self.source.read(stage),
                _ => {
                    let mut places = [IoSliceMut::new(rest), IoSliceMut::new(stage)];
                    self.source.read_vectored(&mut places)
                }
            };
            match outcome {
                Ok(count) => break count,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Ok(0),
                    _ => return Err(ReadError::Io(error)),
                },
            }
        };
        if count == 0 {
            return Err(match self.body.is_none() && self.from == self.to {
                true => ReadError::Closed,
                false => ReadError::Torn,
            });
        }
        self.liveness.on_bytes();
        if let Some(body) = &mut self.body {
            body.filled += count.min(missing);
        }
        self.to += count.saturating_sub(missing);
        Ok(count)
    }

    fn deliver(&mut self, head: Head, chunk: PooledBuffer) -> Result<(), ReadError> {
        let rank = self.rank;
        let phase = match head.kind {
            FrameKind::Abort => {
                let abort = Abort::decode(&head, &self.preamble);
                let abort = abort.ok_or(FrameError::Fingerprint)?;
                self.inbox.aborted(rank, abort);
                return Ok(());
            }
            FrameKind::Goodbye => {
                let kind = match head.index {
                    0 => LeaveKind::Closed,
                    _ => LeaveKind::Dropped,
                };
                self.inbox.left(rank, head.group, kind);
                return Ok(());
            }
            FrameKind::Heartbeat => {
                let heartbeat = Heartbeat::decode(head.sequence);
                let timeout = Duration::from_millis(head.index.into());
                self.liveness.on_heartbeat(timeout);
                self.inbox.on_heartbeat(rank, heartbeat, Instant::now());
                return Ok(());
            }
            FrameKind::Header => OpPhase::Header,
            FrameKind::Reduce => OpPhase::Reduce,
            FrameKind::Gather => OpPhase::Gather,
        };
        let fingerprint = match phase {
            OpPhase::Header => {
                Some(CollectiveFingerprint::decode(&self.preamble).ok_or(FrameError::Fingerprint)?)
            }
            OpPhase::Reduce | OpPhase::Gather => None,
        };
        let received = RecvChunk {
            tag: Tag {
                group: head.group,
                sequence: head.sequence,
                phase,
                index: head.index,
            },
            fingerprint,
            payload: chunk,
        };
        self.is_full = !self.inbox.push(rank, received);
        Ok(())
    }

    fn end(&mut self, error: ReadError) {
        let cause = match error {
            ReadError::Closed => ENDED.to_owned(),
            ReadError::Torn => format!("{ENDED}, in the middle of a frame"),
            ReadError::Io(error) => format!("{ENDED} ({error})"),
            // What follows cannot be understood either.
            ReadError::Frame(_) | ReadError::Message(_) => {
                self.body = None;
                self.discarding = true;
                self.inbox.broke(self.rank, error.to_string());
                return;
            }
        };
        self.has_ended = true;
        self.inbox.lost(self.rank, cause, Certainty::Guessed);
    }
}

/// Memory in which readers stage bytes, while they do: there are many connections, and few have bytes at a time.
#[derive(Debug, Default)]
pub(super) struct Stages(accelerator_host::sync::Mutex<Vec<Box<[u8]>>>);

impl Stages {
    fn take(&self) -> Box<[u8]> {
        let free = self.0.lock().pop();
        free.unwrap_or_else(|| vec![0; STAGING_BYTES].into())
    }

    fn give_back(&self, stage: Box<[u8]>) {
        let mut free = self.0.lock();
        if free.len() < MAX_FREE_STAGES {
            free.push(stage);
        }
    }
}

const MAX_FREE_STAGES: usize = 8;

pub(super) const READER_PANICKED: &str = "a thread that reads its connections panicked";

const ENDED: &str = "its connection ended: the process died or lost the network";

/// Takes a short frame in one read, and the longest preamble with its head.
const STAGING_BYTES: usize = 24 * 1024;
const _: () = assert!(Head::LEN + MAX_PREAMBLE <= STAGING_BYTES);

/// The most reads in one go from a peer whose bytes are discarded.
const READS: usize = 16;

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::transport::{OpPosition, peers, tests::deadline};
    use crate::wire::GroupId;

    /// Pieces of a stream, with a pause after each.
    #[derive(Default)]
    struct Pieces(VecDeque<Vec<u8>>);

    impl Read for Pieces {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some(piece) = self.0.front_mut() else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            let count = piece.len().min(buffer.len());
            buffer[..count].copy_from_slice(&piece[..count]);
            piece.drain(..count);
            if count == 0 || piece.is_empty() {
                self.0.pop_front();
                return match count {
                    0 => Err(io::ErrorKind::WouldBlock.into()),
                    _ => Ok(count),
                };
            }
            Ok(count)
        }
    }

    fn reader() -> FrameReader<Pieces> {
        let inbox = Arc::new(Inbox::new(2));
        let (liveness, stages) = (Arc::new(PeerLiveness::new()), Arc::default());
        FrameReader::new(Pieces::default(), 1, inbox, liveness, stages)
    }

    /// Payloads shorter and longer than the stage.
    fn frames() -> Vec<Vec<u8>> {
        let payloads = [vec![], vec![1; 40], vec![2; 2 * STAGING_BYTES], vec![3; 7]];
        let frames = payloads.iter().enumerate().map(|(index, payload)| {
            let head = Head::new(FrameKind::Reduce, 5, index as u32, &[], payload);
            [&head.encode()[..], payload].concat()
        });
        frames.collect()
    }

    #[test]
    fn a_stream_may_pause_anywhere() {
        let stream = frames().concat();
        let places = (1..200).chain((200..stream.len()).step_by(997));
        for place in places {
            let mut reader = reader();
            for piece in [&stream[..place], &stream[place..]] {
                reader.source.0.push_back(piece.to_vec());
                while reader.read_frames() == ReadOutcome::Frames {}
            }
            assert_eq!(reader.inbox.version(), 4, "paused at {place}");
            assert!(!reader.is_full && !reader.has_ended);
        }
    }

    #[test]
    fn no_whole_frame_is_left_in_memory() {
        let mut reader = reader();
        let short = [&frames()[0][..], &frames()[1], &frames()[3]].concat();
        // All but the last byte, which whoever waits for bytes will see.
        reader.source.0.push_back(short[..short.len() - 1].to_vec());
        assert_eq!(reader.read_frames(), ReadOutcome::Frames);
        assert_eq!(reader.inbox.version(), 2);
        reader.source.0.push_back(short[short.len() - 1..].to_vec());
        assert_eq!(reader.read_frames(), ReadOutcome::Frames);
        assert_eq!(reader.inbox.version(), 3);
        assert_eq!(reader.read_frames(), ReadOutcome::Nothing);
    }

    /// The reader drains the connection until it ends, so that the sender can still read the error that it gets.
    #[test]
    fn what_follows_garbage_is_taken_and_dropped() {
        let mut reader = reader();
        reader.source.0.push_back(frames()[0].clone());
        assert_eq!(reader.read_frames(), ReadOutcome::Frames);
        reader.source.0.push_back(vec![b'x'; 3 * STAGING_BYTES]);
        assert_eq!(reader.read_frames(), ReadOutcome::Nothing);
        assert!(reader.source.0.is_empty() && reader.discarding);
        let version = reader.inbox.version();
        reader.source.0.push_back(frames()[0].clone());
        assert_eq!(reader.read_frames(), ReadOutcome::Nothing);
        assert!(reader.source.0.is_empty());
        assert_eq!(reader.inbox.version(), version);
        assert!(reader.inbox.can_receive(1) && !reader.inbox.is_present(1));
    }

    #[test]
    fn what_waits_for_room_is_delivered_when_there_is_some() {
        let mut reader = reader();
        let inbox = Arc::clone(&reader.inbox);
        let chunk = |index| RecvChunk {
            tag: Tag {
                group: GroupId::WORLD,
                sequence: 5,
                phase: OpPhase::Reduce,
                index,
            },
            fingerprint: None,
            payload: PooledBuffer::default(),
        };
        let mut next = 0..;
        while inbox.push(1, chunk(next.next().unwrap())) {}
        let peers = peers(2);
        let mut deadline = deadline(5, Duration::from_secs(50));
        let mut make_room = || {
            inbox
                .poll(1, OpPosition::First, &peers, &mut deadline)
                .unwrap()
        };
        let frames: Vec<Vec<u8>> = next
            .by_ref()
            .take(3)
            .map(|index| {
                Head::new(FrameKind::Reduce, 5, index, &[], &[])
                    .encode()
                    .to_vec()
            })
            .collect();
        reader.source.0.push_back(frames.concat());
        // Read in one piece, and delivered one by one.
        for left in (0..3).rev() {
            assert!(make_room().is_some());
            assert_eq!(reader.read_frames(), ReadOutcome::Frames);
            assert!(reader.is_full && reader.liveness.is_paused());
            assert_eq!(reader.has_whole(), left > 0);
            assert_eq!(reader.read_frames(), ReadOutcome::Full);
        }
        assert!(reader.source.0.is_empty());
        let mut last = None;
        while let Some(chunk) = make_room() {
            last = Some(chunk.tag.index);
        }
        assert_eq!(last.map(|last| last + 1), next.next());
        assert_eq!(reader.read_frames(), ReadOutcome::Nothing);
        assert!(!reader.is_full && !reader.liveness.is_paused());
    }
}
