//! The formats on connections: frames between ranks (a fixed head, a short preamble, a bounded payload), errors, and
//! messages while ranks meet.

pub(crate) mod message;

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use std::{fmt, io};

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};

use crate::error::{Culprit, Error, Kind};
use crate::fingerprint::CollectiveFingerprint;

/// An error as it is sent. Its cause stays behind, as text of the message.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct WireError {
    kind: Kind,
    ranks: Vec<usize>,
    message: String,
    culprit: Option<Culprit>,
}

impl WireError {
    pub(crate) fn new(error: &Error) -> Self {
        Self::bounded(error, usize::MAX, usize::MAX)
    }

    /// An error whose text has at most `text` bytes, and whose list has at most `ranks` ranks.
    pub(crate) fn bounded(error: &Error, text: usize, ranks: usize) -> Self {
        let culprit = error.culprit().map(|culprit| Culprit {
            host: prefix(&culprit.host, MAX_HOST_BYTES).to_owned(),
            cause: prefix(&culprit.cause, MAX_CAUSE_BYTES.min(text / 2)).to_owned(),
            ..culprit.clone()
        });
        Self {
            kind: error.kind(),
            ranks: error.ranks().iter().copied().take(ranks).collect(),
            message: shorten(&error.to_string(), text),
            culprit,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn into_error(self) -> Error {
        let message = printable(&self.message);
        match self.culprit {
            Some(culprit) if self.ranks == [culprit.rank] => {
                let culprit = Culprit {
                    host: printable(&culprit.host),
                    cause: printable(&culprit.cause),
                    ..culprit
                };
                Error::blaming(self.kind, culprit, message)
            }
            _ => Error::about(self.kind, self.ranks, message),
        }
    }
}

/// Removes control characters from the text of another process, so that it cannot command a terminal. Line breaks stay.
pub(crate) fn printable(text: &str) -> String {
    let is_shown = |letter: &char| !letter.is_control() || matches!(letter, '\n' | '\t');
    text.chars().filter(is_shown).collect()
}

/// Deserializes a text that will be shown.
pub(crate) fn read_printable<'a, D: Deserializer<'a>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(|text| printable(&text))
}

/// Shortens a text to so many bytes; an ellipsis replaces the middle. An error begins with what happened, and ends with
/// the remedy.
pub(crate) fn shorten(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let head = prefix(text, bytes.div_ceil(2));
    let mut tail = text.len() - bytes / 2;
    while !text.is_char_boundary(tail) {
        tail += 1;
    }
    format!("{head}…{}", &text[tail..])
}

fn prefix(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

const MAX_HOST_BYTES: usize = 256;

const MAX_CAUSE_BYTES: usize = 2048;

/// The head of a frame.
///
/// | bytes | content (little-endian) |
/// |---|---|
/// | 0..4 | `ACLF` |
/// | 4 | version |
/// | 5 | kind |
/// | 6..8 | number of the group |
/// | 8..16 | sequence number of the operation |
/// | 16..20 | number of the chunk |
/// | 20..24 | length of the preamble |
/// | 24..28 | length of the payload |
/// | 28..32 | CRC-32 of preamble and payload |
/// | 32..36 | CRC-32 of the bytes before |
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Head {
    pub(crate) kind: FrameKind,
    pub(crate) group: GroupId,
    pub(crate) sequence: u64,
    pub(crate) index: u32,
    pub(crate) preamble: usize,
    pub(crate) payload: usize,
    pub(crate) checksum: u32,
}

impl Head {
    pub(crate) fn new(
        kind: FrameKind,
        sequence: u64,
        index: u32,
        preamble: &[u8],
        payload: &[u8],
    ) -> Self {
        Self {
            kind,
            group: GroupId::WORLD,
            sequence,
            index,
            preamble: preamble.len(),
            payload: payload.len(),
            checksum: checksum(preamble, payload),
        }
    }

    pub(crate) fn in_group(self, group: GroupId) -> Self {
        Self { group, ..self }
    }

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&FRAME_MAGIC);
        out[4] = FRAME_PROTOCOL_VERSION;
        out[5] = self.kind as u8;
        out[6..8].copy_from_slice(&self.group.0.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..20].copy_from_slice(&self.index.to_le_bytes());
        // Both lengths are bounded far below 32 bits.
        out[20..24].copy_from_slice(&(self.preamble as u32).to_le_bytes());
        out[24..28].copy_from_slice(&(self.payload as u32).to_le_bytes());
        out[28..32].copy_from_slice(&self.checksum.to_le_bytes());
        let seal = crc32fast::hash(&out[..32]);
        out[32..36].copy_from_slice(&seal.to_le_bytes());
        out
    }

    /// Reads a head and checks everything that can be checked without the body, its lengths
    /// above all.
    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, FrameError> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[0..4] != FRAME_MAGIC {
            return Err(FrameError::Magic([bytes[0], bytes[1], bytes[2], bytes[3]]));
        }
        if bytes[4] != FRAME_PROTOCOL_VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        if word(32) != crc32fast::hash(&bytes[..32]) {
            return Err(FrameError::Checksum);
        }
        let Some(kind) = FrameKind::from_code(bytes[5]) else {
            return Err(FrameError::Kind(bytes[5]));
        };
        let (preamble, payload) = (word(20) as usize, word(24) as usize);
        if preamble > MAX_PREAMBLE || payload > CHUNK {
            return Err(FrameError::Bounds { preamble, payload });
        }
        Ok(Self {
            kind,
            group: GroupId(u16::from_le_bytes([bytes[6], bytes[7]])),
            sequence: u64::from(word(8)) | u64::from(word(12)) << 32,
            index: word(16),
            preamble,
            payload,
            checksum: word(28),
        })
    }

    /// Reads the next head of a connection.
    #[cfg(test)]
    pub(crate) fn read(from: &mut impl Read) -> Result<Self, ReadError> {
        let mut bytes = [0; Self::LEN];
        fill(from, &mut bytes)?;
        Ok(Self::decode(&bytes)?)
    }

    /// Checks the body that followed.
    pub(crate) fn check(&self, preamble: &[u8], payload: &[u8]) -> Result<(), FrameError> {
        if checksum(preamble, payload) == self.checksum {
            Ok(())
        } else {
            Err(FrameError::Checksum)
        }
    }

    pub(crate) const LEN: usize = 36;
}

/// The number of a group among those of a rank: no two groups that share two ranks have the same one at a time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct GroupId(pub(crate) u16);

impl GroupId {
    /// The group of all ranks.
    pub(crate) const WORLD: Self = Self(0);
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum FrameKind {
    /// The rank gives up; the preamble says why.
    Abort = 1,
    /// The fingerprint of an operation (the preamble) and its first chunk.
    Header = 2,
    /// The rank leaves; the number of the chunk says how: 0 in good order, 1 without a word.
    Goodbye = 3,
    /// The number of the chunk says after how many milliseconds of silence the
    /// sender gives a peer up, that of the operation is a [`Heartbeat`].
    Heartbeat = 4,
    /// A chunk for the rank that reduces it.
    Reduce = 5,
    /// A chunk for a rank that keeps it.
    Gather = 6,
}

impl FrameKind {
    const ALL: [Self; 6] = [
        Self::Abort,
        Self::Header,
        Self::Goodbye,
        Self::Heartbeat,
        Self::Reduce,
        Self::Gather,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }
}

/// The content of a heartbeat, in the place of the operation's number.
///
/// | bits | content |
/// |---|---|
/// | 0..32 | the rank for which the sender waits and one, or zero |
/// | 32..64 | the milliseconds since the sender showed that it works and one, or zero |
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Heartbeat {
    pub(crate) awaited: Option<usize>,
    /// The time since the sender last showed that it works outside of operations.
    pub(crate) active: Option<Duration>,
}

impl Heartbeat {
    pub(crate) fn encode(self) -> u64 {
        // Ranks are far fewer, and a moment longer ago than seven weeks does not matter.
        let code = |number: u128| number.min(u128::from(u32::MAX) - 1) as u64 + 1;
        let awaited = self.awaited.map_or(0, |rank| code(rank as u128));
        let active = self.active.map_or(0, |age| code(age.as_millis()));
        awaited | active << 32
    }

    pub(crate) fn decode(code: u64) -> Self {
        let (awaited, active) = (code & u64::from(u32::MAX), code >> 32);
        let awaited = awaited.checked_sub(1);
        Self {
            awaited: awaited.and_then(|rank| usize::try_from(rank).ok()),
            active: active.checked_sub(1).map(Duration::from_millis),
        }
    }
}

/// The reason why bytes are no frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum FrameError {
    Bounds { preamble: usize, payload: usize },
    Checksum,
    Fingerprint,
    Kind(u8),
    Magic([u8; 4]),
    Version(u8),
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bounds { preamble, payload } => write!(
                f,
                "lengths out of bounds: {preamble} and {payload} bytes, at most {MAX_PREAMBLE} and \
                 {CHUNK} are allowed"
            ),
            Self::Checksum => f.write_str("a wrong checksum"),
            Self::Fingerprint => f.write_str("a malformed fingerprint"),
            Self::Kind(kind) => write!(f, "an unknown kind of frame, {kind}"),
            Self::Magic(found) => write!(f, "bytes that begin no frame, {found:02x?}"),
            Self::Version(found) => write!(
                f,
                "protocol version {found}, expected {FRAME_PROTOCOL_VERSION}"
            ),
        }
    }
}

impl std::error::Error for FrameError {}

/// The error with which a rank gave up, and the operation.
#[derive(Clone, Debug)]
pub(crate) struct Abort {
    pub(crate) group: GroupId,
    pub(crate) sequence: u64,
    pub(crate) error: Error,
}

impl Abort {
    pub(crate) fn encode(&self) -> Vec<u8> {
        to_bytes(&WireError::bounded(
            &self.error,
            MAX_PREAMBLE / 2,
            MAX_ABORT_RANKS,
        ))
    }

    /// Reads what [`encode`](Self::encode) wrote.
    pub(crate) fn decode(head: &Head, bytes: &[u8]) -> Option<Self> {
        let error: WireError = from_bytes(bytes).ok()?;
        Some(Self {
            group: head.group,
            sequence: head.sequence,
            error: error.into_error(),
        })
    }
}

fn checksum(preamble: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(preamble);
    hasher.update(payload);
    hasher.finalize()
}

/// The most bytes of one part; a multiple of every element size.
pub(crate) const CHUNK: usize = 256 * 1024;

/// The most bytes of a preamble: an abort that quotes a disagreement of many ranks.
pub(crate) const MAX_PREAMBLE: usize = 16 * 1024;

const MAX_ABORT_RANKS: usize = 256;

const FRAME_MAGIC: [u8; 4] = *b"ACLF";
const FRAME_PROTOCOL_VERSION: u8 = 8;
const _: () = assert!(CollectiveFingerprint::BOUND <= MAX_PREAMBLE);

/// A connection that is read until a deadline, however slowly the bytes come.
#[derive(Debug)]
pub(crate) struct DeadlineReader<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> DeadlineReader<'a> {
    pub(crate) fn new(stream: &'a TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Sub-millisecond timeouts may be rounded to zero, which means none.
        let left = left.max(Duration::from_millis(1));
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

/// Writes a message, an error or a part of one.
#[expect(clippy::expect_used, reason = "plain data is always written to memory")]
pub(crate) fn to_bytes(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).expect("memory takes every message");
    bytes
}

/// Reads what [`to_bytes`] wrote.
pub(crate) fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ReadError> {
    ciborium::from_reader(bytes).map_err(|error| {
        use ciborium::de::Error;
        // The error of the parser quotes the value, which an unauthenticated peer may have sent.
        ReadError::Message(match error {
            Error::Syntax(at) | Error::Semantic(Some(at), _) => {
                format!("a malformed message, at its byte {at}")
            }
            Error::Io(_) | Error::Semantic(None, _) | Error::RecursionLimitExceeded => {
                "a malformed message".to_owned()
            }
        })
    })
}

pub(crate) fn fill(from: &mut impl Read, buffer: &mut [u8]) -> Result<(), ReadError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Err(ReadError::Closed),
            Ok(0) => return Err(ReadError::Torn),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ReadError::Io(error)),
        }
    }
    Ok(())
}

/// The reason why nothing could be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The connection ended between two frames.
    Closed,
    Frame(FrameError),
    Io(io::Error),
    /// The bytes are no message, or one that has no place here.
    Message(String),
    Torn,
}

impl ReadError {
    pub(crate) fn is_timeout(&self) -> bool {
        use io::ErrorKind::{TimedOut, WouldBlock};
        matches!(self, Self::Io(error) if matches!(error.kind(), TimedOut | WouldBlock))
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the connection was closed"),
            Self::Frame(error) => write!(f, "it sent {error}"),
            Self::Io(_) if self.is_timeout() => f.write_str("nothing came in time"),
            Self::Io(error) => write!(f, "the connection broke: {error}"),
            Self::Message(what) => write!(f, "it sent {what}"),
            Self::Torn => f.write_str("the connection was closed in the middle of a frame"),
        }
    }
}

impl std::error::Error for ReadError {}

impl From<FrameError> for ReadError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::{Certainty, Culprit, Kind};

    fn any_head() -> impl Strategy<Value = Head> {
        let kind = proptest::sample::select(&FrameKind::ALL[..]);
        (
            kind,
            any::<u16>(),
            any::<u64>(),
            any::<u32>(),
            0..=MAX_PREAMBLE,
            0..=CHUNK,
            any::<u32>(),
        )
            .prop_map(
                |(kind, group, sequence, index, preamble, payload, checksum)| Head {
                    group: GroupId(group),
                    kind,
                    sequence,
                    index,
                    preamble,
                    payload,
                    checksum,
                },
            )
    }

    proptest! {
        #[test]
        fn heads_survive_the_wire(head in any_head()) {
            prop_assert_eq!(Head::decode(&head.encode()), Ok(head));
        }

        #[test]
        fn a_changed_bit_is_noticed(head in any_head(), bit in 0..Head::LEN * 8) {
            let mut bytes = head.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Head::decode(&bytes).is_err());
        }

        #[test]
        fn a_truncated_head_is_noticed(head in any_head(), len in 0..Head::LEN) {
            let bytes = head.encode();
            prop_assert!(Head::read(&mut &bytes[..len]).is_err());
        }

        #[test]
        fn garbage_is_no_frame(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Head::read(&mut &bytes[..]).is_err());
            let head = Head::new(FrameKind::Abort, 0, 0, &bytes, &[]);
            let _ = Abort::decode(&head, &bytes);
        }

        #[test]
        fn a_changed_body_is_noticed(
            preamble in proptest::collection::vec(any::<u8>(), 0..50),
            payload in proptest::collection::vec(any::<u8>(), 1..500),
            at in any::<proptest::sample::Index>(),
            flip in 1_u8..,
        ) {
            let head = Head::new(FrameKind::Header, 1, 0, &preamble, &payload);
            prop_assert!(head.check(&preamble, &payload).is_ok());
            let mut changed = payload.clone();
            changed[at.index(payload.len())] ^= flip;
            prop_assert_eq!(head.check(&preamble, &changed), Err(FrameError::Checksum));
        }
    }

    #[test]
    fn lengths_beyond_the_bounds_are_refused() {
        let head = Head {
            group: GroupId::WORLD,
            kind: FrameKind::Gather,
            sequence: 0,
            index: 0,
            preamble: MAX_PREAMBLE + 1,
            payload: 0,
            checksum: 0,
        };
        assert!(matches!(
            Head::decode(&head.encode()),
            Err(FrameError::Bounds { .. })
        ));
        let head = Head {
            preamble: 0,
            payload: CHUNK + 1,
            ..head
        };
        assert!(matches!(
            Head::decode(&head.encode()),
            Err(FrameError::Bounds { .. })
        ));
    }

    #[test]
    fn heartbeats_survive_the_wire() {
        for awaited in [None, Some(0), Some(70_000)] {
            for active in [None, Some(0), Some(90_000)] {
                let active = active.map(Duration::from_millis);
                let heartbeat = Heartbeat { awaited, active };
                assert_eq!(Heartbeat::decode(heartbeat.encode()), heartbeat);
            }
        }
        let long_ago = Heartbeat {
            awaited: None,
            active: Some(Duration::MAX),
        };
        let back = Heartbeat::decode(long_ago.encode());
        assert_eq!(back.awaited, None);
        assert!(back.active.unwrap() > Duration::from_secs(40 * 86_400));
    }

    #[test]
    fn aborts_survive_the_wire() {
        let text = "é".repeat(MAX_PREAMBLE);
        for text in ["rank 1 is lost", &text] {
            let error = Error::about(Kind::Timeout, vec![1, 63], text);
            let bytes = Abort {
                group: GroupId::WORLD,
                sequence: 7,
                error,
            }
            .encode();
            assert!(bytes.len() <= MAX_PREAMBLE);
            let head = Head::new(FrameKind::Abort, 7, 0, &bytes, &[]);
            let back = Abort::decode(&head, &bytes).unwrap();
            assert!(back.error.is_timeout());
            assert_eq!(back.error.ranks(), [1, 63]);
            assert_eq!(back.error.culprit(), None);
            let back = back.error.to_string();
            let (head, tail) = back.split_once('…').unwrap_or((&back, ""));
            assert!(!head.is_empty() && text.starts_with(head) && text.ends_with(tail));
        }
    }

    #[test]
    fn culprits_survive_the_wire() {
        let long = "é".repeat(MAX_PREAMBLE);
        let cases = [
            (Some(7), "it panicked", Certainty::Settled),
            (None, &long, Certainty::Guessed),
        ];
        for (pid, cause, certainty) in cases {
            let culprit = Culprit {
                rank: 63,
                host: "node-7".to_owned(),
                pid,
                cause: cause.to_owned(),
                certainty,
            };
            let error = Error::blaming(Kind::PeerLost, culprit, format!("it is lost: {cause}"));
            let bytes = Abort {
                group: GroupId::WORLD,
                sequence: 7,
                error,
            }
            .encode();
            assert!(bytes.len() <= MAX_PREAMBLE);
            let head = Head::new(FrameKind::Abort, 7, 0, &bytes, &[]);
            let back = Abort::decode(&head, &bytes).unwrap().error;
            assert!(back.is_peer_lost());
            assert_eq!(back.ranks(), [63]);
            let found = back.culprit().unwrap();
            assert_eq!(
                (found.rank(), found.host(), found.pid()),
                (63, "node-7", pid)
            );
            assert!(cause.starts_with(found.cause()) && !found.cause().is_empty());
            assert_eq!(found.certainty, certainty);
            assert!(Abort::decode(&head, &bytes[..20]).is_none());
        }
    }
}
