//! A rank's declaration of an operation, in words of shared memory.

use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::Atomics;
use crate::fingerprint::{CollectiveFingerprint, SEED, mix};

/// One rank's header of one operation, and where its data lie.
///
/// | word | content |
/// |---|---|
/// | 0 | operation, reduction, element type, length of the file name (a byte each), root |
/// | 1 | number of elements |
/// | 2 | sequence number of the operation |
/// | 3 | offset of the data in the rank's arena, or all ones |
/// | 4 | a checksum of what the operation is for |
/// | 5 | a checksum of the words before |
/// | 6.. | line of the call and length of the purpose, file of the call, purpose |
///
/// Ranks that agree read the first six words, which lie in one cache line.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct ShmHeader {
    words: [AtomicU64; WORDS],
}

// SAFETY: atomic integers, and padding that nobody reads.
unsafe impl Atomics for ShmHeader {}

impl ShmHeader {
    /// Writes the header, and says how the others will read it. What is read meanwhile is
    /// garbage: the protocol says when to read.
    pub(crate) fn write(
        &self,
        sequence: u64,
        fingerprint: &CollectiveFingerprint,
        data: Option<usize>,
    ) -> HeaderDigest {
        let mut words = [0; WORDS];
        let (bytes, len) = fingerprint.encode();
        let (fixed, texts) = bytes[..len].split_at(CollectiveFingerprint::FIXED);
        let word = |range: std::ops::Range<usize>| {
            let mut word = [0; 8];
            word[..range.len()].copy_from_slice(&fixed[range]);
            u64::from_le_bytes(word)
        };
        words[0] = word(0..8);
        words[1] = word(8..16);
        words[2] = sequence;
        words[3] = data.map_or(u64::MAX, |offset| offset as u64);
        words[4] = fingerprint.purpose.words().fold(SEED, mix);
        words[CHECK] = words[..CHECK].iter().copied().fold(SEED, mix);
        words[6] = word(16..24);
        for (target, source) in words[TEXTS..].iter_mut().zip(texts.chunks(8)) {
            let mut word = [0; 8];
            word[..source.len()].copy_from_slice(source);
            *target = u64::from_le_bytes(word);
        }
        // What is behind the texts, nobody reads.
        let used = TEXTS + texts.len().div_ceil(8);
        for (target, word) in self.words.iter().zip(words).take(used) {
            target.store(word, Ordering::Relaxed);
        }
        HeaderDigest::of(&words)
    }

    /// Makes it wrong, as a fault.
    pub(crate) fn inject_corruption(&self) {
        self.words[2].fetch_xor(1, Ordering::Relaxed);
    }

    /// Reads what matters to ranks that agree; `None` if the check is wrong.
    pub(crate) fn read(&self) -> Option<HeaderDigest> {
        let words: [u64; CHECK + 1] = std::array::from_fn(|i| self.word(i));
        if words[..CHECK].iter().copied().fold(SEED, mix) != words[CHECK] {
            return None;
        }
        Some(HeaderDigest::of(&words))
    }

    /// Reads everything; `None` if it is no header.
    pub(crate) fn fingerprint(&self) -> Option<CollectiveFingerprint> {
        let mut bytes = [0; CollectiveFingerprint::BOUND];
        bytes[..8].copy_from_slice(&self.word(0).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.word(1).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.word(6).to_le_bytes());
        for (target, word) in bytes[CollectiveFingerprint::FIXED..]
            .chunks_mut(8)
            .zip(TEXTS..)
        {
            target.copy_from_slice(&self.word(word).to_le_bytes()[..target.len()]);
        }
        let end = CollectiveFingerprint::FIXED + usize::from(bytes[3]) + usize::from(bytes[20]);
        CollectiveFingerprint::decode(bytes.get(..end)?)
    }

    fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
    }
}

/// The part of a header that matters to ranks that agree.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct HeaderDigest {
    /// Operation, reduction, element type and root.
    pub(crate) kind: u64,
    /// The number of elements.
    pub(crate) len: u64,
    pub(crate) sequence: u64,
    /// A checksum of what the operation is for.
    pub(crate) purpose: u64,
    /// The offset of the data in the rank's arena.
    pub(crate) data: Option<u64>,
}

impl HeaderDigest {
    fn of(words: &[u64]) -> Self {
        Self {
            // Without the length of the file name, in which ranks may differ.
            kind: words[0] & !(0xff << 24),
            len: words[1],
            sequence: words[2],
            purpose: words[4],
            data: (words[3] != u64::MAX).then_some(words[3]),
        }
    }
}

const CHECK: usize = 5;
const TEXTS: usize = 7;
const WORDS: usize = 24;

const _: () = assert!(
    CollectiveFingerprint::BOUND - CollectiveFingerprint::FIXED <= 8 * (WORDS - TEXTS),
    "a fingerprint fits its header"
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        element::{DType, ReduceOp},
        fingerprint::{CallSite, OpKind, Purpose},
    };

    fn header() -> ShmHeader {
        ShmHeader {
            words: Default::default(),
        }
    }

    #[test]
    fn fingerprints_survive_the_header() {
        let header = header();
        assert_eq!(header.read(), None, "nobody has written it");
        for path in ["", "main.rs", &format!("{}/train.rs", "x".repeat(100))] {
            let fingerprint =
                CollectiveFingerprint::new(OpKind::AllReduce, CallSite::new(path, 77))
                    .with_op(ReduceOp::Mean)
                    .with_data(DType::BF16, 1 << 33)
                    .with_purpose(Purpose::new(path));
            header.write(5, &fingerprint, Some(4096));
            let digest = header.read().unwrap();
            assert_eq!((digest.len, digest.sequence), (1 << 33, 5));
            assert_eq!(digest.data, Some(4096));
            let back = header.fingerprint().unwrap();
            assert_eq!(back.to_string(), fingerprint.to_string());
        }
    }

    #[test]
    fn ranks_that_mean_the_same_write_the_same() {
        let (one, two) = (header(), header());
        let declare = |header: &ShmHeader, path, root| {
            let fingerprint = CollectiveFingerprint::new(OpKind::Broadcast, CallSite::new(path, 1))
                .with_data(DType::F32, 3)
                .with_root(root);
            header.write(0, &fingerprint, None);
            header.read().unwrap()
        };
        let gather = CollectiveFingerprint::new(OpKind::GatherObject, CallSite::new("a.rs", 1));
        let named = |name| {
            one.write(0, &gather.with_purpose(Purpose::new(name)), None);
            one.read().unwrap()
        };
        assert_ne!(named("a metric"), named("a trace"));
        assert_eq!(declare(&one, "a.rs", 1), declare(&two, "other.rs", 1));
        assert_ne!(declare(&one, "a.rs", 1), declare(&two, "a.rs", 2));
    }

    #[test]
    fn a_corrupted_header_is_noticed() {
        let header = header();
        header.write(
            0,
            &CollectiveFingerprint::new(OpKind::Barrier, CallSite::new("a.rs", 1)),
            None,
        );
        assert!(header.read().is_some());
        header.inject_corruption();
        assert_eq!(header.read(), None);
    }
}
