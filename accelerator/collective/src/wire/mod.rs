//! The formats on connections: frames between ranks, and messages while they meet.

pub(crate) mod frame;
pub(crate) mod message;

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Culprit, Error, Kind};

pub(crate) use frame::ReadError;

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

    #[expect(clippy::expect_used, reason = "plain data is always written to memory")]
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        ciborium::into_writer(self, &mut bytes).expect("memory takes every error");
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` where the bytes are anything else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        ciborium::from_reader(bytes).ok()
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

/// The most bytes of the name of a host.
const MAX_HOST_BYTES: usize = 256;

/// The most bytes of a cause.
const MAX_CAUSE_BYTES: usize = 2048;
