//! The data on the standard input and output of an agent: its hello, and the order to it.
//!
//! ```text
//! agent → client   MAGIC, Hello; then the output of its launcher
//! client → agent   Order; then a byte for each signal; the end means: kill everything
//! ```
//!
//! Start-up files of a shell may print before the hello.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::agent::line::write_frame;

/// The length of the largest order: the system allows an environment of a few MiB.
pub(super) const MAX_ORDER: usize = 64 << 20;

/// The length of the longest hello.
const MAX_HELLO: usize = 64 << 10;

/// The largest output of a start-up file before the hello.
const MAX_NOISE: usize = 1 << 20;

/// The first bytes of the hello.
const MAGIC: &[u8] = b"\0accel-launch agent\0";

/// The hello of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AgentHello {
    /// The version of its program.
    pub(super) version: String,
    /// `SSH_CONNECTION`: the addresses and ports of the client and of the host.
    pub(super) connection: Option<String>,
    /// A port that is free on its host.
    pub(super) port: u16,
}

/// The order to an agent.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Order {
    /// The token of the job.
    pub(super) token: String,
    /// The current folder.
    pub(super) folder: PathBuf,
    /// The command line of the launcher, with the program's name.
    pub(super) arguments: Vec<OsString>,
    /// Variables in addition to those of the host.
    pub(super) variables: Vec<(OsString, OsString)>,
}

impl fmt::Debug for Order {
    /// Omits the token, and the variables, which may hold others.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Order");
        shown.field("arguments", &self.arguments);
        shown.finish_non_exhaustive()
    }
}

/// Says hello.
pub(super) fn greet(output: &mut impl Write, hello: &AgentHello) -> io::Result<()> {
    output.write_all(MAGIC)?;
    send(output, hello)?;
    output.flush()
}

/// Waits for a hello, and skips what comes before it.
pub(super) fn greeted(input: &mut impl Read) -> io::Result<AgentHello> {
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(MAGIC) {
        input.read_exact(&mut byte)?;
        seen.push(byte[0]);
        if seen.len() > MAX_NOISE {
            return Err(io::Error::other("it prints something else without end"));
        }
    }
    receive(input, MAX_HELLO)
}

/// Writes a message.
pub(super) fn send(output: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    write_frame(output, &serde_json::to_vec(message)?)
}

/// Reads a message of at most `most` bytes.
pub(super) fn receive<M: DeserializeOwned>(input: &mut impl Read, most: usize) -> io::Result<M> {
    let mut header = [0; 4];
    input.read_exact(&mut header)?;
    let length = u32::from_le_bytes(header) as usize;
    if length > most {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length];
    input.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn what_a_shell_prints_before_the_hello_is_skipped() {
        let hello = AgentHello {
            version: "1".to_owned(),
            connection: None,
            port: 7,
        };
        let mut sent = b"JoinReply to a!\n\0\0accel-launch \xff".to_vec();
        greet(&mut sent, &hello).unwrap();
        sent.extend_from_slice(b"output");
        let mut input = sent.as_slice();
        assert_eq!(greeted(&mut input).unwrap().port, 7);
        assert_eq!(input, b"output");
        assert!(greeted(&mut &b"nothing"[..]).is_err());
        assert!(greeted(&mut io::repeat(b'x')).is_err());
    }

    #[test]
    fn an_order_keeps_bytes_that_are_no_text_and_shows_no_secret() {
        let order = Order {
            token: "secret".to_owned(),
            folder: "/a".into(),
            arguments: vec![OsString::from_vec(b"\xff".to_vec())],
            variables: vec![("A".into(), "secret".into())],
        };
        let mut sent = Vec::new();
        send(&mut sent, &order).unwrap();
        assert!(receive::<Order>(&mut sent.as_slice(), sent.len() - 5).is_err());
        let received: Order = receive(&mut sent.as_slice(), MAX_ORDER).unwrap();
        assert_eq!(received.arguments, order.arguments);
        assert!(!format!("{received:?}").contains("secret"));
    }
}
