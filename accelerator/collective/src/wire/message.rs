//! Messages while ranks meet: with the store, and with one another.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::source::{ReadError, Source, fill};
use crate::error::{Error, Kind};

/// Everything that is said before a group is connected.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Message {
    /// A rank to the store: what it wants to join.
    Hello {
        nonce: Nonce,
        job: String,
        proves: Proves,
    },
    /// The store to the rank: proof of the token, where there is one, and a question.
    Challenge {
        nonce: Nonce,
        proof: Option<[u8; 32]>,
    },
    /// The rank to the store: a [`Registration`], with proof of the token.
    Register {
        body: Vec<u8>,
        proof: Option<[u8; 32]>,
    },
    /// The store to the rank: a [`Table`], with proof of the token.
    Welcome {
        body: Vec<u8>,
        proof: Option<[u8; 32]>,
    },
    /// The store to the rank: no, and why.
    Refused(Refusal),
    /// A rank to another one: who it is.
    Greet { from: u32, to: u32, nonce: Nonce },
    /// The other one: proof of the job.
    Answer { nonce: Nonce, proof: [u8; 32] },
    /// And back.
    Confirm { proof: [u8; 32] },
}

impl Message {
    /// Sends the message, in one piece.
    pub(crate) fn send(&self, mut stream: &TcpStream) -> Result<(), ReadError> {
        let body = to_bytes(self);
        let mut out = Vec::with_capacity(ENVELOPE + body.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[VERSION, 0, 0, 0]);
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
        out.extend_from_slice(&body);
        stream
            .set_write_timeout(Some(Duration::from_secs(5)))
            .and_then(|()| stream.write_all(&out))
            .map_err(ReadError::Io)
    }

    /// Receives the next message, which may be as long as `bound` and must come by the
    /// deadline.
    pub(crate) fn receive(
        stream: &TcpStream,
        bound: usize,
        deadline: Instant,
    ) -> Result<Self, ReadError> {
        Self::read(&mut Source::new(stream, deadline), bound)
    }

    fn read(from: &mut impl Read, bound: usize) -> Result<Self, ReadError> {
        let mut envelope = [0; ENVELOPE];
        fill(from, &mut envelope)?;
        let word = |at: usize| {
            u32::from_le_bytes([
                envelope[at],
                envelope[at + 1],
                envelope[at + 2],
                envelope[at + 3],
            ])
        };
        if envelope[..4] != MAGIC {
            return Err(ReadError::Message(format!(
                "bytes of another protocol, {:02x?}",
                &envelope[..4]
            )));
        }
        if envelope[4] != VERSION {
            return Err(ReadError::Message(format!(
                "protocol version {}, expected {VERSION}: all ranks and the launcher must be \
                 built with the same version of this library",
                envelope[4]
            )));
        }
        let len = word(8) as usize;
        if len > bound {
            return Err(ReadError::Message(format!(
                "a message of {len} bytes, at most {bound} are allowed"
            )));
        }
        let mut body = vec![0; len];
        match fill(from, &mut body) {
            Err(ReadError::Closed) => return Err(ReadError::Torn),
            other => other?,
        }
        if word(12) != crc32fast::hash(&body) {
            return Err(ReadError::Message("a wrong checksum".to_owned()));
        }
        from_bytes(&body)
    }
}

/// Whether a rank can prove a token.
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
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where it listens for the other ranks.
    pub(crate) address: SocketAddr,
    /// How long it will wait for the others.
    pub(crate) patience: Duration,
}

/// All ranks of a job, in rank order.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Table {
    pub(crate) ranks: Vec<Registration>,
    /// What the key of the job is made from.
    pub(crate) secret: Nonce,
}

/// Why a rank cannot join.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Refusal {
    pub(crate) kind: u8,
    pub(crate) ranks: Vec<usize>,
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn new(error: &Error) -> Self {
        Self {
            kind: error.kind().code(),
            ranks: error.ranks().to_vec(),
            reason: error.message().to_owned(),
        }
    }

    pub(crate) fn into_error(self) -> Error {
        let kind = Kind::from_code(self.kind).unwrap_or(Kind::Rendezvous);
        Error::about(kind, self.ranks, self.reason)
    }
}

pub(crate) type Nonce = [u8; 32];

#[expect(clippy::expect_used, reason = "plain data is always written to memory")]
pub(crate) fn to_bytes(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).expect("memory takes every message");
    bytes
}

pub(crate) fn from_bytes<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ReadError> {
    ciborium::from_reader(bytes)
        .map_err(|error| ReadError::Message(format!("a malformed message, {error}")))
}

/// The most bytes of a message that somebody unknown may send.
pub(crate) const SHORT: usize = 4 * 1024;

/// The most bytes of a table: over a thousand ranks.
pub(crate) const LONG: usize = 1024 * 1024;

const MAGIC: [u8; 4] = *b"ACLR";
const VERSION: u8 = 1;
const ENVELOPE: usize = 16;

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;

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
    fn messages_survive_the_wire_and_nothing_else_does() {
        let bytes = exchange(&Message::Greet {
            from: 3,
            to: 1,
            nonce: [7; 32],
        });
        let back = Message::read(&mut &bytes[..], SHORT).unwrap();
        assert!(matches!(back, Message::Greet { from: 3, to: 1, nonce } if nonce == [7; 32]));
        for cut in 0..bytes.len() {
            assert!(Message::read(&mut &bytes[..cut], SHORT).is_err());
        }
        assert!(
            Message::read(&mut &bytes[..], 10).is_err(),
            "the bound holds"
        );
        for at in [0, 4, 8, 12, 20] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(
                Message::read(&mut &changed[..], SHORT).is_err(),
                "byte {at}"
            );
        }
    }

    #[test]
    fn another_version_is_told() {
        let mut bytes = exchange(&Message::Confirm { proof: [0; 32] });
        bytes[4] = 9;
        let error = Message::read(&mut &bytes[..], SHORT).unwrap_err();
        assert!(error.to_string().contains("protocol version 9, expected 1"));
    }

    proptest! {
        #[test]
        fn rubbish_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Message::read(&mut &bytes[..], SHORT).is_err());
            let _ = from_bytes::<Message>(&bytes);
            let _ = from_bytes::<Table>(&bytes);
        }
    }
}
