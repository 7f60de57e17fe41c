//! Messages of ranks with the store, and with one another while they meet.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{DeadlineReader, ReadError, WireError, fill, from_bytes, read_printable, to_bytes};
use crate::{
    error::{Certainty, Culprit},
    fingerprint::OpKind,
    topology::TransportKind,
};

/// Everything that is said outside of operations.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Message {
    /// A rank to the store: what it wants to join.
    Hello {
        nonce: Nonce,
        job: String,
        proves: Proves,
    },
    /// The store to the rank: proof of the token, where there is one, and a question. The
    /// process that hosts the store is for messages only.
    Challenge {
        nonce: Nonce,
        proof: Option<[u8; 32]>,
        #[serde(deserialize_with = "read_printable")]
        host: String,
        pid: u32,
    },
    /// The rank to the store: a [`Registration`], with proof of the token.
    Register {
        #[serde(with = "serde_bytes")]
        body: Vec<u8>,
        proof: Option<[u8; 32]>,
    },
    /// The store to the rank: a [`RankTable`], with proof of the token.
    Welcome {
        #[serde(with = "serde_bytes")]
        body: Vec<u8>,
        proof: Option<[u8; 32]>,
    },
    /// The store to the rank: no, and why; until it is connected, also after the table.
    Refused(WireError),
    /// Either way until the rank is connected.
    Heartbeat,
    /// The store to a rank that waits: whom for. At most [`MAX_MESSAGE_RANKS`] of them, and how many.
    Waiting { missing: Vec<usize>, count: usize },
    /// The rank to the store: it is connected to all others.
    Connected,
    /// The rank to the store: its group failed, and whom it blames.
    ReportFailure(WireError),
    /// The rank to the store: it leaves in good order.
    Leave,
    /// The store to the rank: a rank has ended, and how.
    ExitNotice {
        rank: usize,
        #[serde(deserialize_with = "read_printable")]
        text: String,
    },
    /// The store to the rank: what is known about a rank, should anybody ask.
    ExitInfo {
        rank: usize,
        #[serde(deserialize_with = "read_printable")]
        text: String,
    },
    /// The store to the rank: the launch variables of its place in the next group, by name; none where it has no place in
    /// it.
    NextPlace { variables: Vec<(String, String)> },
    /// The store to the rank: it closes in good order.
    StoreClosing,
    /// A rank to another one: who it is.
    Greet { from: u32, to: u32, nonce: Nonce },
    /// The other one: proof of the job.
    Answer { nonce: Nonce, proof: [u8; 32] },
    /// And back.
    Confirm { proof: [u8; 32] },
    /// The other one: the connection counts.
    Accepted,
    /// The store to the rank: a question for its last operations.
    AskRecords,
    /// The rank to the store: its last operations.
    Records(Vec<OpRecord>),
    /// An observer to the store, in place of a registration: proof of the token, where there is one. It asks for the last
    /// operations of all ranks.
    Inspect { proof: Option<[u8; 32]> },
    /// The store to the observer: the last operations of a rank, which may be unknown.
    RecordsOf {
        rank: usize,
        #[serde(deserialize_with = "read_printable")]
        host: String,
        pid: u32,
        state: RankStatus,
        records: Option<Vec<OpRecord>>,
    },
}

impl Message {
    pub(crate) fn send(&self, stream: &TcpStream) -> Result<(), ReadError> {
        self.send_within(stream, Duration::from_secs(5))
    }

    /// Sends the message, in one piece, to somebody who may not take it: without any progress
    /// that [soon](SHORT_SEND_TIMEOUT) is an error, and the connection is of no use any more.
    pub(crate) fn offer(&self, stream: &TcpStream) -> Result<(), ReadError> {
        self.send_within(stream, SHORT_SEND_TIMEOUT)
    }

    fn send_within(&self, mut stream: &TcpStream, limit: Duration) -> Result<(), ReadError> {
        stream
            .set_write_timeout(Some(limit))
            .and_then(|()| stream.write_all(&self.encode()))
            .map_err(ReadError::Io)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let body = to_bytes(self);
        let mut out = Vec::with_capacity(ENVELOPE_BYTES + body.len());
        out.extend_from_slice(&MESSAGE_MAGIC);
        out.extend_from_slice(&[STORE_PROTOCOL_VERSION, 0, 0, 0]);
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
        out.extend_from_slice(&body);
        out
    }

    /// Waits until a message begins to arrive; without a pause, for as long as it takes. Says
    /// whether one does; the end of the connection is an error.
    pub(crate) fn arrives(stream: &TcpStream, pause: Option<Duration>) -> Result<bool, ReadError> {
        // Sub-millisecond timeouts may be rounded to zero, which means none.
        let pause = pause.map(|pause| pause.max(Duration::from_millis(1)));
        let seen = stream
            .set_read_timeout(pause)
            .and_then(|()| stream.peek(&mut [0]));
        match seen {
            Ok(0) => Err(ReadError::Closed),
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => match ReadError::Io(error) {
                error if error.is_timeout() => Ok(false),
                error => Err(error),
            },
        }
    }

    /// Receives the next message, which may be as long as `bound` and must come by the
    /// deadline.
    pub(crate) fn receive(
        stream: &TcpStream,
        bound: usize,
        deadline: Instant,
    ) -> Result<Self, ReadError> {
        Self::read(&mut DeadlineReader::new(stream, deadline), bound)
    }

    pub(crate) fn read(from: &mut impl Read, bound: usize) -> Result<Self, ReadError> {
        let mut envelope = [0; ENVELOPE_BYTES];
        fill(from, &mut envelope)?;
        let len = Self::expected_len(&envelope, bound)? - ENVELOPE_BYTES;
        let mut body = vec![0; len];
        match fill(from, &mut body) {
            Err(ReadError::Closed) => return Err(ReadError::Torn),
            other => other?,
        }
        if envelope_u32(&envelope, 12) != crc32fast::hash(&body) {
            return Err(ReadError::Message("a wrong checksum".to_owned()));
        }
        from_bytes(&body)
    }

    /// Returns the length of the message that starts with `received`, or of its envelope if that is still incomplete.
    /// Fails if the envelope is invalid, or the body is longer than `bound`.
    pub(crate) fn expected_len(received: &[u8], bound: usize) -> Result<usize, ReadError> {
        let Some(envelope) = received.first_chunk::<ENVELOPE_BYTES>() else {
            return Ok(ENVELOPE_BYTES);
        };
        if envelope[..4] != MESSAGE_MAGIC {
            return Err(ReadError::Message(format!(
                "bytes of another protocol, {:02x?}",
                &envelope[..4]
            )));
        }
        if envelope[4] != STORE_PROTOCOL_VERSION {
            return Err(ReadError::Message(format!(
                "protocol version {}, expected {STORE_PROTOCOL_VERSION}: all ranks and the launcher must be \
                 built with the same version of this library",
                envelope[4]
            )));
        }
        let len = envelope_u32(envelope, 8) as usize;
        if len > bound {
            return Err(ReadError::Message(format!(
                "a message of {len} bytes, at most {bound} are allowed"
            )));
        }
        Ok(ENVELOPE_BYTES + len)
    }
}

/// Reads the little-endian `u32` at this offset.
fn envelope_u32(envelope: &[u8; ENVELOPE_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([
        envelope[at],
        envelope[at + 1],
        envelope[at + 2],
        envelope[at + 3],
    ])
}

/// The token that a rank can prove, if any.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum Proves {
    Nothing,
    Token,
}

/// A rank as it registers.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Registration {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    #[serde(deserialize_with = "read_printable")]
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) address: SocketAddr,
    /// The time for which the rank will wait for the others.
    // Its name on the wire.
    #[serde(rename = "patience")]
    pub(crate) connect_timeout: Duration,
    /// The time without a heartbeat after which the rank takes others for lost.
    pub(crate) liveness: Duration,
    /// The transport that it was asked to use.
    #[serde(with = "name")]
    pub(crate) transport: TransportKind,
    /// The boot of its host's kernel, if the system tells.
    #[serde(default)]
    pub(crate) boot: Option<String>,
    /// The rank's place on its host, if its launcher gave one.
    #[serde(default)]
    pub(crate) local: Option<LocalPlace>,
}

impl Registration {
    pub(crate) fn culprit(&self, cause: impl Into<String>) -> Culprit {
        Culprit {
            rank: self.rank,
            host: self.host.clone(),
            pid: Some(self.pid),
            cause: cause.into(),
            certainty: Certainty::Settled,
        }
    }
}

/// The place of a rank on its host: its number among the ranks there, and how many they are.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(crate) struct LocalPlace {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

/// An operation of a rank, as its flight recorder keeps it. Times are microseconds since the Unix epoch, by the clock of
/// the rank's host.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OpRecord {
    /// The operation.
    pub kind: OpKind,
    /// The operation with its arguments and its purpose, such as `all_reduce sum f32 x 10`.
    #[serde(deserialize_with = "read_printable")]
    pub call: String,
    /// The file and line of the call.
    #[serde(deserialize_with = "read_printable")]
    pub site: String,
    /// The size of the data that the rank passed.
    pub bytes: u64,
    /// The group: 0 is the world, and groups that are parts of it count from 1.
    pub group: u16,
    /// The number of the operation in its group, from 0, the same on every rank.
    pub sequence: u64,
    /// The time at which its turn came.
    pub started: u64,
    /// The time at which it ended; `None` while it is in progress. For an operation of at most 64 KiB that did not
    /// wait, this equals `started`.
    pub ended: Option<u64>,
    /// True if it ended with an error.
    pub failed: bool,
}

/// The state of a rank, as the store sees it when somebody asks for its operations.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub enum RankStatus {
    /// It is not connected to all others yet.
    Meeting,
    /// It has answered: the operations are current.
    Answered,
    /// It does not answer; the operations are those that it has told before.
    Silent,
    /// It has closed its group, or its connection has ended; the operations are those that it has told before.
    Gone,
}

/// A transport by its name.
mod name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::topology::TransportKind;

    pub(super) fn serialize<S: Serializer>(kind: &TransportKind, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(kind)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<TransportKind, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// All ranks of a job, in rank order.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(into = "CompactTable", try_from = "CompactTable")]
pub(crate) struct RankTable {
    pub(crate) ranks: Vec<Registration>,
    /// The secret from which the key of the job is derived.
    pub(crate) secret: Nonce,
}

/// A rank table on the wire, which lists each host once: a rank takes some 63 bytes, with its share of a host of eight.
#[derive(Deserialize, Serialize)]
struct CompactTable {
    hosts: Vec<CompactHost>,
    ranks: Vec<CompactRank>,
    secret: Nonce,
}

#[derive(Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
struct CompactHost(
    #[serde(deserialize_with = "read_printable")] String,
    /// The boot of its kernel.
    Option<String>,
);

#[derive(Deserialize, Serialize)]
struct CompactRank {
    /// The place of its host among the hosts.
    #[serde(rename = "h")]
    host: usize,
    #[serde(rename = "p")]
    pid: u32,
    #[serde(rename = "a")]
    address: SocketAddr,
    /// The timeouts, in milliseconds.
    #[serde(rename = "c")]
    connect_timeout: u64,
    #[serde(rename = "l")]
    liveness: u64,
    #[serde(rename = "t", with = "name")]
    transport: TransportKind,
    /// The place on its host.
    #[serde(rename = "n")]
    local: Option<(usize, usize)>,
}

impl From<RankTable> for CompactTable {
    fn from(table: RankTable) -> Self {
        let mut places = BTreeMap::new();
        let mut hosts = Vec::new();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let ranks = table.ranks.into_iter().map(|rank| {
            let host = (rank.host, rank.boot);
            let place = *places.entry(host.clone()).or_insert_with(|| {
                hosts.push(CompactHost(host.0, host.1));
                hosts.len() - 1
            });
            CompactRank {
                host: place,
                pid: rank.pid,
                address: rank.address,
                connect_timeout: millis(rank.connect_timeout),
                liveness: millis(rank.liveness),
                transport: rank.transport,
                local: rank.local.map(|local| (local.rank, local.size)),
            }
        });
        Self {
            ranks: ranks.collect(),
            secret: table.secret,
            hosts,
        }
    }
}

impl TryFrom<CompactTable> for RankTable {
    type Error = &'static str;

    fn try_from(table: CompactTable) -> Result<Self, Self::Error> {
        let is_long = |CompactHost(host, boot): &CompactHost| {
            host.len() > MAX_HOST_BYTES
                || boot
                    .as_ref()
                    .is_some_and(|boot| boot.len() > MAX_HOST_BYTES)
        };
        if table.hosts.iter().any(is_long) {
            return Err("the name of a host is too long");
        }
        let world_size = table.ranks.len();
        let registration = |(rank, compact): (usize, CompactRank)| {
            let CompactHost(host, boot) = table
                .hosts
                .get(compact.host)
                .ok_or("a rank is on a host that is not listed")?;
            Ok(Registration {
                rank,
                world_size,
                host: host.clone(),
                pid: compact.pid,
                address: compact.address,
                connect_timeout: Duration::from_millis(compact.connect_timeout),
                liveness: Duration::from_millis(compact.liveness),
                transport: compact.transport,
                boot: boot.clone(),
                local: compact.local.map(|(rank, size)| LocalPlace { rank, size }),
            })
        };
        let ranks = table.ranks.into_iter().enumerate().map(registration);
        Ok(Self {
            ranks: ranks.collect::<Result<_, Self::Error>>()?,
            secret: table.secret,
        })
    }
}

pub(crate) type Nonce = [u8; 32];

/// The longest time that a receiver may take to make room for a few bytes.
pub(crate) const SHORT_SEND_TIMEOUT: Duration = Duration::from_millis(200);

/// The most bytes of a message that somebody unknown may send.
pub(crate) const MAX_SHORT_BYTES: usize = 4 * 1024;

/// The most bytes of a table; one of 8,192 ranks fits.
pub(crate) const MAX_TABLE_BYTES: usize = 1024 * 1024;

/// The most bytes of the name of a host, which each of its ranks repeats.
const MAX_HOST_BYTES: usize = 255;

/// The most bytes of the last operations of a rank.
pub(crate) const MAX_RECORDS_BYTES: usize = 64 * 1024;

pub(crate) const MAX_MESSAGE_RANKS: usize = 64;

/// The most bytes of a text in a [`MAX_SHORT_BYTES`] message.
pub(crate) const MAX_TEXT_BYTES: usize = 2000;

const MESSAGE_MAGIC: [u8; 4] = *b"ACLR";
const STORE_PROTOCOL_VERSION: u8 = 7;
const ENVELOPE_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        error::{Certainty, Culprit, Error, Kind},
        wire::shorten,
    };

    fn exchange(message: &Message) -> Vec<u8> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        message.send(&stream).unwrap();
        drop(stream);
        let mut bytes = Vec::new();
        listener
            .accept()
            .unwrap()
            .0
            .read_to_end(&mut bytes)
            .unwrap();
        bytes
    }

    #[test]
    fn a_table_of_thousands_of_ranks_fits_and_survives_the_wire() {
        let rank = |rank: usize| Registration {
            rank,
            world_size: 8192,
            host: format!("gpu-node-{:04}.cluster.example.org", rank / 8),
            pid: 3_000_000 + rank as u32,
            address: (
                [10, 128, (rank / 2048) as u8, (rank / 8) as u8],
                40_000 + (rank % 20_000) as u16,
            )
                .into(),
            connect_timeout: Duration::from_secs(600),
            liveness: Duration::from_millis(5_500),
            transport: TransportKind::Auto,
            boot: Some(format!("6f1c2a90-58d1-4d3c-a1fd-{:012}", rank / 8)),
            local: Some(LocalPlace {
                rank: rank % 8,
                size: 8,
            }),
        };
        let table = RankTable {
            ranks: (0..8192).map(rank).collect(),
            secret: [200; 32],
        };
        let message = Message::Welcome {
            body: to_bytes(&table),
            proof: Some([7; 32]),
        };
        let bytes = message.encode();
        assert!(bytes.len() < MAX_TABLE_BYTES / 4 * 3, "{}", bytes.len());
        let back = Message::read(&mut &bytes[..], MAX_TABLE_BYTES).unwrap();
        let Message::Welcome { body, .. } = back else {
            panic!("{back:?}");
        };
        assert_eq!(from_bytes::<RankTable>(&body).unwrap(), table);
    }

    #[test]
    fn a_rank_on_a_host_that_is_not_listed_is_refused() {
        let table = CompactTable {
            hosts: Vec::new(),
            ranks: vec![CompactRank {
                host: 0,
                pid: 1,
                address: ([127, 0, 0, 1], 1).into(),
                connect_timeout: 1,
                liveness: 1,
                transport: TransportKind::Auto,
                local: None,
            }],
            secret: [0; 32],
        };
        assert!(from_bytes::<RankTable>(&to_bytes(&table)).is_err());
    }

    #[test]
    fn messages_survive_the_wire_and_nothing_else_does() {
        let bytes = exchange(&Message::Greet {
            from: 3,
            to: 1,
            nonce: [7; 32],
        });
        let back = Message::read(&mut &bytes[..], MAX_SHORT_BYTES).unwrap();
        assert!(matches!(back, Message::Greet { from: 3, to: 1, nonce } if nonce == [7; 32]));
        for cut in 0..bytes.len() {
            assert!(Message::read(&mut &bytes[..cut], MAX_SHORT_BYTES).is_err());
        }
        assert!(
            Message::read(&mut &bytes[..], 10).is_err(),
            "the bound holds"
        );
        for at in [0, 4, 8, 12, 20] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(
                Message::read(&mut &changed[..], MAX_SHORT_BYTES).is_err(),
                "byte {at}"
            );
        }
    }

    #[test]
    fn another_version_is_told() {
        let mut bytes = exchange(&Message::Confirm { proof: [0; 32] });
        bytes[4] = 9;
        let error = Message::read(&mut &bytes[..], MAX_SHORT_BYTES).unwrap_err();
        assert!(error.to_string().contains("protocol version 9, expected "));
    }

    #[test]
    fn a_registration_of_an_older_version_is_read() {
        /// The registration with which the protocol began.
        #[derive(Deserialize, Serialize)]
        struct Older {
            rank: usize,
            world_size: usize,
            host: String,
            pid: u32,
            address: SocketAddr,
            patience: Duration,
            liveness: Duration,
            #[serde(with = "name")]
            transport: TransportKind,
        }
        let older = Older {
            rank: 1,
            world_size: 2,
            host: "here".to_owned(),
            pid: 17,
            address: "127.0.0.1:1".parse().unwrap(),
            patience: Duration::from_secs(1),
            liveness: Duration::from_secs(1),
            transport: TransportKind::Auto,
        };
        let read: Registration = from_bytes(&to_bytes(&older)).unwrap();
        assert_eq!((read.rank, &read.boot, read.local), (1, &None, None));
        let newer = Registration {
            boot: Some("id".to_owned()),
            local: Some(LocalPlace { rank: 1, size: 2 }),
            ..read
        };
        let older: Older = from_bytes(&to_bytes(&newer)).unwrap();
        assert_eq!((older.rank, &*older.host), (1, "here"));
    }

    #[test]
    fn nothing_that_is_shown_commands_a_terminal() {
        let hostile = "\u{1b}[2Jgone\u{7}\u{9b}31m\r";
        let culprit = Culprit {
            rank: 3,
            host: hostile.to_owned(),
            pid: Some(17),
            cause: format!("two\nlines {hostile}"),
            certainty: Certainty::Guessed,
        };
        let error = Error::blaming(Kind::PeerLost, culprit, hostile);
        let told: WireError = from_bytes(&to_bytes(&WireError::new(&error))).unwrap();
        let told = told.into_error();
        let culprit = told.culprit().unwrap();
        assert_eq!(
            (&*told.to_string(), culprit.host()),
            ("[2Jgone31m", "[2Jgone31m")
        );
        assert_eq!(culprit.cause(), "two\nlines [2Jgone31m");
        let notice = to_bytes(&Message::ExitNotice {
            rank: 1,
            text: hostile.to_owned(),
        });
        let told: Message = from_bytes(&notice).unwrap();
        assert!(matches!(told, Message::ExitNotice { text, .. } if text == "[2Jgone31m"));
        // A message of an unknown kind, which an error must not quote.
        let unknown = to_bytes(&std::collections::BTreeMap::from([(hostile, 1)]));
        let error = from_bytes::<Message>(&unknown).unwrap_err().to_string();
        assert!(!error.contains("gone"), "{error}");
    }

    /// Returns an error as the store hears of it.
    fn heard(error: &Error) -> Error {
        let report = WireError::bounded(error, MAX_TEXT_BYTES, MAX_MESSAGE_RANKS);
        let bytes = exchange(&Message::ReportFailure(report));
        assert!(bytes.len() <= MAX_SHORT_BYTES);
        match Message::read(&mut &bytes[..], MAX_SHORT_BYTES).unwrap() {
            Message::ReportFailure(back) => back.into_error(),
            other => panic!("unexpected {other:?}"),
        }
    }

    #[test]
    fn failure_reports_are_bounded_and_name_the_culprit() {
        let ranks = (1_000_000..1_100_000).collect();
        let back = heard(&Error::about(Kind::PeerLost, ranks, "é".repeat(5000)));
        assert!(back.is_peer_lost());
        assert_eq!(back.ranks().len(), MAX_MESSAGE_RANKS);
        assert!(back.to_string().contains("é…é"));
        assert_eq!(shorten("short", 5), "short");
        assert_eq!(shorten("shorter", 5), "sho…er");
        assert_eq!(shorten("éééé", 5), "é…é");
        let culprit = Culprit {
            rank: 3,
            host: "h".repeat(5000),
            pid: Some(17),
            cause: "é".repeat(5000),
            certainty: Certainty::Guessed,
        };
        let back = heard(&Error::blaming(Kind::PeerLost, culprit, "x".repeat(5000)));
        let culprit = back.culprit().unwrap();
        assert_eq!((culprit.rank(), culprit.pid()), (3, Some(17)));
        assert_eq!(culprit.certainty, Certainty::Guessed);
        assert!(culprit.cause().starts_with("éé"));
    }

    #[test]
    fn waiting_for_a_message_keeps_it_whole() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let pause = Some(Duration::from_millis(10));
        assert!(!Message::arrives(&far, pause).unwrap());
        Message::Heartbeat.send(&near).unwrap();
        assert!(Message::arrives(&far, None).unwrap());
        let due = Instant::now() + Duration::from_secs(30);
        let message = Message::receive(&far, MAX_SHORT_BYTES, due).unwrap();
        assert!(matches!(message, Message::Heartbeat));
        drop(near);
        assert!(matches!(
            Message::arrives(&far, None),
            Err(ReadError::Closed)
        ));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Message::read(&mut &bytes[..], MAX_SHORT_BYTES).is_err());
            let _ = from_bytes::<Message>(&bytes);
            let _ = from_bytes::<RankTable>(&bytes);
        }
    }
}
