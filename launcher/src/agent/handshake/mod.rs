//! The handshake of two launchers: version, token, and the purpose of the connection.
//!
//! ```text
//! host → head   MAGIC, Hello with nonce N
//! head → host   MAGIC, Challenge with nonce M and mac("head", N, M)
//! host → head   JoinRequest, mac("host", M, N, entry)
//! head → host   JoinReply, mac("welcome", N, M, welcome)
//! ```
//!
//! `mac` is the proof of the job's token; it is absent if the token is waived. Either side may refuse at its turn. This
//! side shows the other's reason only if the other has proved the token; before, it shows a message of its own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use accelerator_collective::internal::Token;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::line::{JoinReply, JoinRequest, PROTOCOL, is_timeout, write_frame};

/// The first bytes of a connection between launchers, in both directions.
const MAGIC: [u8; 8] = *b"accel-hs";

/// The length of the largest frame of a peer that has not proved the token.
const MAX_FRAME: usize = 16 << 10;

/// The length of the longest text of an unauthenticated peer that is shown.
const MAX_TEXT: usize = 400;

/// The reason for which a host is not admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It may be admitted when it asks again.
    Retry(String),
    /// It never will.
    Permanent(String),
    /// Nor will this job ever begin: hosts contradict one another.
    Conflict(String),
}

impl Refusal {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Retry(text) | Self::Permanent(text) | Self::Conflict(text) => text,
        }
    }
}

/// Asks the head at the other end of `stream` to admit this host, and waits for the answer until `until`.
///
/// # Errors
/// When it does not admit it, or this host does not trust the head.
pub(super) fn ask(
    stream: &TcpStream,
    token: Option<&Token>,
    entry: &JoinRequest,
    until: Instant,
) -> Result<JoinReply, Refusal> {
    let nonce = nonce()?;
    begin(stream)?;
    send(
        stream,
        &Hello {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            nonce,
            proves_token: token.is_some(),
        },
    )?;
    check_magic(stream, until)?;
    let challenge = match receive(stream, until)? {
        FromHead::Challenge(challenge) => challenge,
        // It says so after the challenge, which tells version and token.
        FromHead::Refused(_) => return Err(Refusal::Permanent(UNPROVED.to_owned())),
        FromHead::Admitted { .. } => return Err(Refusal::Retry(UNEXPECTED.to_owned())),
    };
    let trusted = check_version(challenge.protocol, &challenge.version, "host 0").and_then(|()| {
        let own = challenge.nonce;
        match (token, &challenge.proof) {
            (None, None) => Ok(own),
            (Some(token), Some(proof)) if token.accepts("head", &[&nonce, &own], proof) => Ok(own),
            (Some(_), Some(_)) => Err(OTHER_TOKEN.to_owned()),
            (Some(_), None) | (None, Some(_)) => Err(ONE_TOKEN.to_owned()),
        }
    });
    let own = trusted.map_err(|text| {
        // It is told, so that its user knows too. It may be gone.
        let _ = send(stream, &FromHost::Refused(Refused::ever(&text)));
        Refusal::Permanent(text)
    })?;
    let body = json(entry)?;
    let proof = token.map(|token| token.prove("host", &[&own, &nonce, body.as_bytes()]));
    send(stream, &FromHost::JoinRequest { body, proof })?;
    match receive(stream, until)? {
        FromHead::Admitted { body, proof } => {
            let parts: [&[u8]; 3] = [&nonce, &own, body.as_bytes()];
            match (token, &proof) {
                (None, _) => parse(&body),
                (Some(token), Some(proof)) if token.accepts("welcome", &parts, proof) => {
                    parse(&body)
                }
                _ => Err(Refusal::Permanent(OTHER_TOKEN.to_owned())),
            }
        }
        FromHead::Refused(refusal) => Err(refusal.into()),
        FromHead::Challenge(_) => Err(Refusal::Retry(UNEXPECTED.to_owned())),
    }
}

/// Answers the other side, with `limit` for each of its messages, and admits it if `decide` does.
///
/// # Errors
/// Returns the refusal that was sent to the other side.
pub(super) fn answer<T>(
    stream: &TcpStream,
    token: Option<&Token>,
    limit: Duration,
    decide: impl FnOnce(JoinRequest) -> Result<(JoinReply, T), Refusal>,
) -> Result<T, Refusal> {
    let soon = || Instant::now() + limit;
    check_magic(stream, soon())?;
    let hello: Hello = receive(stream, soon())?;
    begin(stream)?;
    let refuse = |refusal: Refusal| {
        let told = match &refusal {
            Refusal::Retry(text) => Refused {
                text: text.clone(),
                is_final: false,
            },
            Refusal::Permanent(text) | Refusal::Conflict(text) => Refused::ever(text),
        };
        let _ = send(stream, &FromHead::Refused(told));
        refusal
    };
    let (its, own) = (hello.nonce, nonce()?);
    send(
        stream,
        &FromHead::Challenge(Challenge {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            nonce: own,
            proof: token.map(|token| token.prove("head", &[&its, &own])),
        }),
    )?;
    // The challenge tells the other side, too.
    let version = check_version(hello.protocol, &hello.version, "it");
    version.map_err(Refusal::Permanent)?;
    if hello.proves_token != token.is_some() {
        return Err(Refusal::Permanent(ONE_TOKEN.to_owned()));
    }
    let (body, proof) = match receive(stream, soon())? {
        FromHost::JoinRequest { body, proof } => (body, proof),
        // Every other cause of a refusal has been checked before.
        FromHost::Refused(_) => return Err(Refusal::Permanent(OTHER_TOKEN.to_owned())),
    };
    if let Some(token) = token {
        let parts: [&[u8]; 3] = [&own, &its, body.as_bytes()];
        if !proof.is_some_and(|proof| token.accepts("host", &parts, &proof)) {
            return Err(refuse(Refusal::Permanent(OTHER_TOKEN.to_owned())));
        }
    }
    let (welcome, admitted) = decide(parse(&body)?).map_err(refuse)?;
    let body = json(&welcome)?;
    let proof = token.map(|token| token.prove("welcome", &[&its, &own, body.as_bytes()]));
    send(stream, &FromHead::Admitted { body, proof })?;
    Ok(admitted)
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
const OTHER_TOKEN: &str =
    "the token files (ACCEL_TOKEN_FILE) of this host and of host 0 hold different tokens";
const ONE_TOKEN: &str = "one of this host and host 0 has a token (ACCEL_TOKEN_FILE), and the other one does without \
                         (ACCEL_INSECURE=1)";
const UNEXPECTED: &str = "it answered something unexpected";
const STRANGER: &str = "what answers there is no accel-launch";
const UNPROVED: &str = "it refused this host before it proved the token: another program uses the port, or an accel-launch \
                        of another version";

type Nonce = [u8; 32];

/// The first message. Its fields stay as they are in every version, so that two versions can say so to each other.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    protocol: u32,
    version: String,
    nonce: Nonce,
    proves_token: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Challenge {
    protocol: u32,
    version: String,
    nonce: Nonce,
    proof: Option<Nonce>,
}

#[derive(Debug, Serialize, Deserialize)]
enum FromHead {
    Challenge(Challenge),
    Admitted { body: String, proof: Option<Nonce> },
    Refused(Refused),
}

#[derive(Debug, Serialize, Deserialize)]
enum FromHost {
    JoinRequest { body: String, proof: Option<Nonce> },
    Refused(Refused),
}

#[derive(Debug, Serialize, Deserialize)]
struct Refused {
    text: String,
    is_final: bool,
}

impl Refused {
    fn ever(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            is_final: true,
        }
    }
}

impl From<Refused> for Refusal {
    /// The text is of an unauthenticated peer: nothing in it may move a cursor.
    fn from(refused: Refused) -> Self {
        let text = refused.text.chars().filter(|c| !c.is_control());
        let text = text.take(MAX_TEXT).collect();
        match refused.is_final {
            true => Self::Permanent(text),
            false => Self::Retry(text),
        }
    }
}

fn nonce() -> Result<Nonce, Refusal> {
    Token::nonce().map_err(|error| Refusal::Permanent(error.to_string()))
}

fn check_version(protocol: u32, version: &str, who: &str) -> Result<(), String> {
    if (protocol, version) == (PROTOCOL, VERSION) {
        return Ok(());
    }
    // It has proved nothing: a version, and no words.
    let is_of_version = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+');
    let version: String = version.chars().take_while(is_of_version).take(20).collect();
    Err(format!(
        "{who} runs accel-launch {version} (protocol {protocol}), and the other side accel-launch {VERSION} (protocol \
         {PROTOCOL}): install one version on all hosts"
    ))
}

fn begin(mut stream: &TcpStream) -> Result<(), Refusal> {
    stream
        .write_all(&MAGIC)
        .map_err(|error| Refusal::Retry(error.to_string()))
}

fn check_magic(stream: &TcpStream, until: Instant) -> Result<(), Refusal> {
    let mut magic = [0; MAGIC.len()];
    read_exact(stream, &mut magic, until)?;
    match magic == MAGIC {
        true => Ok(()),
        false => Err(Refusal::Permanent(STRANGER.to_owned())),
    }
}

fn send(mut stream: &TcpStream, message: &impl Serialize) -> Result<(), Refusal> {
    let body = json(message)?;
    write_frame(&mut stream, body.as_bytes()).map_err(|error| Refusal::Retry(error.to_string()))
}

fn receive<T: DeserializeOwned>(stream: &TcpStream, until: Instant) -> Result<T, Refusal> {
    let mut header = [0; 4];
    read_exact(stream, &mut header, until)?;
    let length = u32::from_le_bytes(header) as usize;
    if length > MAX_FRAME {
        return Err(Refusal::Permanent(STRANGER.to_owned()));
    }
    let mut body = vec![0; length];
    read_exact(stream, &mut body, until)?;
    serde_json::from_slice(&body).map_err(|_| Refusal::Permanent(STRANGER.to_owned()))
}

fn read_exact(
    mut stream: &TcpStream,
    mut buffer: &mut [u8],
    until: Instant,
) -> Result<(), Refusal> {
    while !buffer.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Refusal::Retry("it did not answer in time".to_owned()));
        }
        let read = stream
            .set_read_timeout(Some(left))
            .and_then(|()| stream.read(buffer));
        match read {
            Ok(0) => return Err(Refusal::Retry("it closed the connection".to_owned())),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if is_timeout(&error) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Refusal::Retry(error.to_string())),
        }
    }
    Ok(())
}

fn json(value: &impl Serialize) -> Result<String, Refusal> {
    serde_json::to_string(value).map_err(|error| Refusal::Permanent(error.to_string()))
}

fn parse<T: DeserializeOwned>(body: &str) -> Result<T, Refusal> {
    serde_json::from_str(body).map_err(|_| Refusal::Permanent(STRANGER.to_owned()))
}

#[cfg(test)]
mod tests;
