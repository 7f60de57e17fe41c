//! The fingerprint of a collective, which each rank sends with its call, so that ranks that call different collectives
//! all fail with the same error; and checksums of such data.

use std::{fmt, panic::Location};

use serde::{Deserialize, Serialize};

use crate::{
    element::{DType, ReduceOp, names},
    error::{Error, Kind},
};

/// The call of one rank: the operation, its arguments and the call site.
///
/// A rank sends it in the header of an operation to every other rank. Each rank compares the
/// fingerprints of all ranks before it uses any data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct CollectiveFingerprint {
    pub(crate) kind: OpKind,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) dtype: Option<DType>,
    pub(crate) root: Option<usize>,
    pub(crate) len: usize,
    pub(crate) site: CallSite,
    pub(crate) purpose: Purpose,
}

impl CollectiveFingerprint {
    pub(crate) fn new(kind: OpKind, site: CallSite) -> Self {
        Self {
            kind,
            op: None,
            dtype: None,
            root: None,
            len: 0,
            site,
            purpose: Purpose::NONE,
        }
    }

    pub(crate) fn with_op(self, op: ReduceOp) -> Self {
        Self {
            op: Some(op),
            ..self
        }
    }

    pub(crate) fn with_data(self, dtype: DType, len: usize) -> Self {
        Self {
            dtype: Some(dtype),
            len,
            ..self
        }
    }

    pub(crate) fn with_root(self, root: usize) -> Self {
        Self {
            root: Some(root),
            ..self
        }
    }

    pub(crate) fn with_purpose(self, purpose: Purpose) -> Self {
        Self { purpose, ..self }
    }

    /// Checks if two ranks mean the same operation. Call sites may differ.
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.op == other.op
            && self.dtype == other.dtype
            && self.root == other.root
            && self.purpose == other.purpose
            && (self.len == other.len || !self.kind.fixes_len())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.map_or(1, DType::size)
    }

    /// The fingerprint as bytes of a frame's preamble.
    pub(crate) fn encode(&self) -> ([u8; Self::BOUND], usize) {
        let mut out = [0; Self::BOUND];
        out[0] = self.kind.code();
        out[1] = self.op.map_or(0, ReduceOp::code);
        out[2] = self.dtype.map_or(0, DType::code);
        out[3] = self.site.len;
        // A world size fits 32 bits; u32::MAX stands for "no root".
        let root = self.root.map_or(u32::MAX, |root| root as u32);
        out[4..8].copy_from_slice(&root.to_le_bytes());
        out[8..16].copy_from_slice(&(self.len as u64).to_le_bytes());
        out[16..20].copy_from_slice(&self.site.line.to_le_bytes());
        let purpose = self.purpose.as_str().as_bytes();
        // At most Purpose::BOUND, which fits. The rest of the fixed part is zero.
        out[20] = purpose.len() as u8;
        let mut end = Self::FIXED;
        for text in [self.site.file().as_bytes(), purpose] {
            out[end..end + text.len()].copy_from_slice(text);
            end += text.len();
        }
        (out, end)
    }

    /// Reads what [`encode`](Self::encode) wrote; returns `None` if the bytes are anything else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (fixed, texts) = bytes.split_at_checked(Self::FIXED)?;
        let optional = |code: u8| (code != 0).then_some(code);
        let op = match optional(fixed[1]) {
            Some(code) => Some(ReduceOp::from_code(code)?),
            None => None,
        };
        let dtype = match optional(fixed[2]) {
            Some(code) => Some(DType::from_code(code)?),
            None => None,
        };
        let (file, purpose) = texts.split_at_checked(usize::from(fixed[3]))?;
        if usize::from(fixed[20]) != purpose.len() || purpose.len() > Purpose::BOUND {
            return None;
        }
        let root = u32::from_le_bytes(fixed[4..8].try_into().ok()?);
        let len = u64::from_le_bytes(fixed[8..16].try_into().ok()?);
        let len = usize::try_from(len).ok()?;
        len.checked_mul(dtype.map_or(1, DType::size))?;
        Some(Self {
            kind: OpKind::from_code(fixed[0])?,
            op,
            dtype,
            root: (root != u32::MAX).then_some(root as usize),
            len,
            site: CallSite::new(
                std::str::from_utf8(file).ok()?,
                u32::from_le_bytes(fixed[16..20].try_into().ok()?),
            ),
            purpose: Purpose::new(std::str::from_utf8(purpose).ok()?),
        })
    }

    pub(crate) const BOUND: usize = Self::FIXED + CallSite::BOUND + Purpose::BOUND;

    pub(crate) const FIXED: usize = 24;
}

impl CollectiveFingerprint {
    /// The call without its site, for example "all_reduce sum f32 x 10".
    pub(crate) fn call(&self) -> impl fmt::Display {
        fmt::from_fn(|f| self.describe(f, None))
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>, site: Option<CallSite>) -> fmt::Result {
        let purpose = self.purpose.as_str();
        if !purpose.is_empty() {
            write!(f, "{purpose} (")?;
        }
        f.write_str(self.kind.name())?;
        if let Some(op) = self.op {
            write!(f, " {op}")?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype} x {}", self.len)?;
        }
        if let Some(root) = self.root {
            write!(f, " from rank {root}")?;
        }
        if let Some(site) = site {
            write!(f, " at {site}")?;
        }
        f.write_str(if purpose.is_empty() { "" } else { ")" })
    }
}

impl fmt::Display for CollectiveFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, Some(self.site))
    }
}

/// The operations of a process group. Their numbers are the ones on the wire.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(into = "u8", try_from = "u8")]
#[non_exhaustive]
pub enum OpKind {
    /// Every rank gets values of the same length from every rank.
    AllGather = 1,
    /// Every rank gets an object from every rank.
    AllGatherObject = 2,
    /// Every rank gets parts of buffers from every rank.
    AllGatherParts = 3,
    /// Every rank gets values of varying length from every rank.
    AllGatherVaried = 4,
    /// Every rank gets the reduction of all values.
    AllReduce = 5,
    /// Ranks wait for one another.
    Barrier = 6,
    /// Every rank gets the values of one rank.
    Broadcast = 7,
    /// Every rank gets the object of one rank.
    BroadcastObject = 8,
    /// Objects that ranks exchange while the group connects.
    Connect = 9,
    /// One rank gets an object from every rank.
    GatherObject = 10,
    /// Every rank gets its part of the reduction.
    ReduceScatter = 11,
    /// Every rank gets its part of a reduced buffer, by a shard layout.
    ReduceScatterBuffer = 12,
    /// Every rank gets an object of its own from one rank.
    ScatterObject = 13,
    /// Every rank gets the shards of all ranks, by a shard layout.
    AllGatherBuffer = 14,
}

impl From<OpKind> for u8 {
    fn from(kind: OpKind) -> Self {
        kind.code()
    }
}

impl TryFrom<u8> for OpKind {
    type Error = String;

    fn try_from(code: u8) -> Result<Self, String> {
        Self::from_code(code).ok_or_else(|| format!("no operation has the number {code}"))
    }
}

impl OpKind {
    /// Returns `true` if all ranks must declare the same length.
    pub(crate) fn fixes_len(self) -> bool {
        match self {
            Self::AllGather
            | Self::AllGatherBuffer
            | Self::AllReduce
            | Self::Barrier
            | Self::Broadcast
            | Self::ReduceScatter
            | Self::ReduceScatterBuffer => true,
            Self::AllGatherObject
            | Self::AllGatherParts
            | Self::AllGatherVaried
            | Self::BroadcastObject
            | Self::Connect
            | Self::GatherObject
            | Self::ScatterObject => false,
        }
    }

    fn code(self) -> u8 {
        self as u8
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

names! {
    OpKind,
    /// All operations.
    pub ALL,
    /// Returns the name of the method that starts the operation.
    pub name {
        AllGather "all_gather",
        AllGatherBuffer "all_gather_buffer",
        AllGatherObject "all_gather_object",
        AllGatherParts "all_gather_parts",
        AllGatherVaried "all_gather_varied",
        AllReduce "all_reduce",
        Barrier "barrier",
        Broadcast "broadcast",
        BroadcastObject "broadcast_object",
        Connect "connect",
        GatherObject "gather_object",
        ReduceScatter "reduce_scatter",
        ReduceScatterBuffer "reduce_scatter_buffer",
        ScatterObject "scatter_object",
    }
}

/// The place where an operation was called: file and line, the file cut at the front to a bound.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct CallSite {
    file: [u8; Self::BOUND],
    len: u8,
    line: u32,
}

impl CallSite {
    pub(crate) fn new(file: &str, line: u32) -> Self {
        let mut start = file.len().saturating_sub(Self::BOUND);
        while !file.is_char_boundary(start) {
            start += 1;
        }
        let tail = &file.as_bytes()[start..];
        let mut bytes = [0; Self::BOUND];
        bytes[..tail.len()].copy_from_slice(tail);
        Self {
            file: bytes,
            // At most BOUND, which fits.
            len: tail.len() as u8,
            line,
        }
    }

    pub(crate) fn of(location: &Location<'_>) -> Self {
        Self::new(location.file(), location.line())
    }

    fn file(&self) -> &str {
        // Cut at a character boundary by the only constructor.
        std::str::from_utf8(&self.file[..usize::from(self.len)]).unwrap_or("?")
    }

    const BOUND: usize = 72;
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file(), self.line)
    }
}

impl fmt::Debug for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error of ranks whose fingerprints differ: those of the members of a group, whose ranks `member` returns. The text
/// is the same on every rank and lists each fingerprint with the ranks that sent it.
pub(crate) fn mismatch(
    number: impl fmt::Display,
    fingerprints: &[Option<CollectiveFingerprint>],
    member: impl Fn(usize) -> usize,
) -> Error {
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (place, fingerprint) in fingerprints.iter().enumerate() {
        let rank = member(place);
        let text = match fingerprint {
            Some(fingerprint) => fingerprint.to_string(),
            None => "has not called it yet".to_owned(),
        };
        match groups.iter_mut().find(|(other, _)| *other == text) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((text, vec![rank])),
        }
    }
    let sides: Vec<String> = groups
        .iter()
        .map(|(side, ranks)| {
            let ranks_text: Vec<String> = ranks.iter().map(usize::to_string).collect();
            let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
            format!("{noun} {}: {side}", ranks_text.join(", "))
        })
        .collect();
    Error::new(
        Kind::Mismatch,
        format!(
            "the ranks disagree in collective {number}: {}; every rank must call the same \
             collectives in the same order, with the same element type, length and root",
            sides.join("; ")
        ),
    )
}

/// A short text that travels with the header of an operation; empty if none was given.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Purpose {
    bytes: [u8; Self::BOUND],
    len: u8,
}

impl Purpose {
    pub(crate) const NONE: Self = Self {
        bytes: [0; Self::BOUND],
        len: 0,
    };

    /// The beginning of `text`, up to the length that fits.
    pub(crate) fn new(text: &str) -> Self {
        let mut end = text.len().min(Self::BOUND);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = [0; Self::BOUND];
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        Self {
            bytes,
            // At most BOUND, which fits.
            len: end as u8,
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        // Cut at a character boundary by the only constructor.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or("?")
    }

    /// The text as words, padded with zeros; empty if there is no purpose.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        let used = usize::from(self.len).next_multiple_of(size_of::<u64>());
        let words = self.bytes[..used].as_chunks().0.iter();
        words.map(|word| u64::from_le_bytes(*word))
    }

    pub(crate) const BOUND: usize = 40;
}

impl fmt::Debug for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// The checksum of nothing. It is not zero, so that zeros are not their own checksum.
///
/// These checksums guard against accidents only, on paths where a digest, or even a CRC-32, would take a fifth of the
/// time.
pub(crate) const SEED: u64 = 0x6163_6365_6c5f_7368;

/// Extends the checksum `sum` by one more word.
pub(crate) fn mix(sum: u64, word: u64) -> u64 {
    let mixed = (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fingerprints_survive_the_wire() {
        let site = CallSite::new("src/train.rs", 12);
        let fingerprints = [
            CollectiveFingerprint::new(OpKind::Barrier, site),
            CollectiveFingerprint::new(OpKind::AllReduce, site)
                .with_op(ReduceOp::Sum)
                .with_data(DType::F32, 10),
            CollectiveFingerprint::new(OpKind::Broadcast, site)
                .with_data(DType::BF16, 1 << 40)
                .with_root(63),
            CollectiveFingerprint::new(OpKind::GatherObject, site)
                .with_purpose(Purpose::new("a metric")),
            CollectiveFingerprint::new(OpKind::Barrier, CallSite::new(&"x".repeat(100), u32::MAX))
                .with_purpose(Purpose::new(&"y".repeat(100))),
        ];
        for fingerprint in fingerprints {
            let (bytes, len) = fingerprint.encode();
            let back = CollectiveFingerprint::decode(&bytes[..len]).unwrap();
            assert!(fingerprint.agrees_with(&back));
            assert_eq!(fingerprint.to_string(), back.to_string());
            for cut in 0..len {
                assert!(CollectiveFingerprint::decode(&bytes[..cut]).is_none());
            }
        }
    }

    #[test]
    fn long_paths_keep_their_end() {
        let site = CallSite::new(&format!("{}/ä/train.rs", "é".repeat(200)), 7);
        assert!(site.to_string().ends_with("/ä/train.rs:7"));
        assert!(site.to_string().len() <= CallSite::BOUND + 2);
    }

    #[test]
    fn a_mismatch_lists_every_fingerprint() {
        let site = CallSite::new("train.rs", 12);
        let reduce = CollectiveFingerprint::new(OpKind::AllReduce, site)
            .with_op(ReduceOp::Sum)
            .with_data(DType::F32, 10);
        let barrier = CollectiveFingerprint::new(OpKind::Barrier, CallSite::new("train.rs", 20));
        let fingerprints = [Some(reduce), Some(barrier), Some(reduce), None];
        let error = mismatch("#3", &fingerprints, |rank| rank);
        assert!(error.is_mismatch());
        assert!(error.to_string().starts_with(
            "the ranks disagree in collective #3: ranks 0, 2: all_reduce sum f32 x 10 at \
             train.rs:12; rank 1: barrier at train.rs:20; rank 3: has not called it yet;"
        ));
    }

    #[test]
    fn the_purpose_is_shown_first_and_compared() {
        let gather =
            CollectiveFingerprint::new(OpKind::AllGatherObject, CallSite::new("train.rs", 12));
        let metric = gather.with_purpose(Purpose::new("a metric"));
        assert_eq!(
            metric.to_string(),
            "a metric (all_gather_object at train.rs:12)"
        );
        assert!(!metric.agrees_with(&gather));
        assert!(!metric.agrees_with(&gather.with_purpose(Purpose::new("a trace"))));
    }

    #[test]
    fn only_lengths_of_varied_operations_may_differ() {
        let site = CallSite::new("train.rs", 1);
        let with_len = |kind, len| CollectiveFingerprint::new(kind, site).with_data(DType::U8, len);
        for kind in OpKind::ALL {
            let agrees = with_len(kind, 1).agrees_with(&with_len(kind, 2));
            assert_eq!(agrees, !kind.fixes_len(), "{}", kind.name());
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = CollectiveFingerprint::decode(&bytes);
        }
    }
    #[test]
    fn long_texts_keep_their_beginning() {
        let long = Purpose::new(&format!("{}ä", "x".repeat(Purpose::BOUND - 1)));
        assert_eq!(long.as_str(), "x".repeat(Purpose::BOUND - 1));
        let fits = "x".repeat(Purpose::BOUND);
        assert_eq!(Purpose::new(&fits).as_str(), fits);
    }
}
