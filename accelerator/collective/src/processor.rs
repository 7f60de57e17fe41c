//! The features of the processor that a program was compiled for, where a launcher finds them in the program's file.

use std::hint::black_box;

/// Begins the list of features in a program's file. A new line ends it.
const BEGIN: &[u8] = b"accelerate target features:";

/// The length of a mark, which has room for all features.
const MARK_BYTES: usize = 512;

/// Features of the processor that a program was compiled for (`-C target-cpu`, `-C target-feature`), beyond those that
/// every processor of its architecture has.
///
/// A program that links this library has them in its file, so that a launcher can refuse it on a host whose processor
/// lacks one: there it would end by SIGILL, somewhere.
///
/// ```
/// use accelerator_collective::internal::TargetFeatures;
///
/// let own = TargetFeatures::of_this_program();
/// assert!(own.missing().is_empty(), "it runs");
///
/// let program = b"\x7fELF ... accelerate target features:avx2,another-one,\n ...";
/// let features = TargetFeatures::of_program(program).unwrap();
/// assert_eq!(features.names(), ["avx2", "another-one"]);
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TargetFeatures(Vec<String>);

impl TargetFeatures {
    /// The features that this program was compiled for.
    pub fn of_this_program() -> Self {
        let compiled = KNOWN.iter().filter(|(_, is_compiled)| *is_compiled);
        Self(compiled.map(|(name, _)| (*name).to_owned()).collect())
    }

    /// The features that a program was compiled for, read from its file; `None` if it does not link this library.
    /// `file` may be the part of the file in which constants are.
    pub fn of_program(file: &[u8]) -> Option<Self> {
        let begins = (0..file.len()).filter(|&at| file[at] == BEGIN[0]);
        begins
            .filter_map(|at| file[at..].strip_prefix(BEGIN))
            .find_map(|list| {
                let list = &list[..list.len().min(MARK_BYTES)];
                // This very constant may stand in a file, too.
                let end = list.iter().position(|byte| !is_of_list(*byte))?;
                let names = std::str::from_utf8(&list[..end]).ok()?;
                let names = names.split(',').filter(|name| !name.is_empty());
                (list[end] == b'\n').then(|| Self(names.map(str::to_owned).collect()))
            })
    }

    /// The names of the features, as the compiler writes them.
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }

    /// The features that the processor of this host lacks. A feature unknown to this library counts as present.
    pub fn missing(&self) -> Vec<&str> {
        let names = self.0.iter().map(String::as_str);
        names.filter(|name| !is_present(name)).collect()
    }
}

pub(crate) fn keep_mark() {
    black_box(&MARK);
}

static MARK: [u8; MARK_BYTES] = mark();

const fn mark() -> [u8; MARK_BYTES] {
    let mut mark = [0; MARK_BYTES];
    let mut end = append(&mut mark, 0, BEGIN);
    let mut at = 0;
    while at < KNOWN.len() {
        let (name, is_compiled) = KNOWN[at];
        if is_compiled {
            end = append(&mut mark, end, name.as_bytes());
            end = append(&mut mark, end, b",");
        }
        at += 1;
    }
    append(&mut mark, end, b"\n");
    mark
}

/// Writes `bytes` at `start`, and gives where they end.
const fn append(mark: &mut [u8; MARK_BYTES], start: usize, bytes: &[u8]) -> usize {
    let mut at = 0;
    while at < bytes.len() {
        mark[start + at] = bytes[at];
        at += 1;
    }
    start + at
}

fn is_of_list(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.,".contains(&byte)
}

macro_rules! known {
    ($is_detected:ident: $($name:tt)*) => {
        /// The features that are known here, and whether this program was compiled for each.
        const KNOWN: &[(&str, bool)] = &[$(($name, cfg!(target_feature = $name)),)*];

        fn is_present(name: &str) -> bool {
            match name {
                $($name => std::arch::$is_detected!($name),)*
                _ => true,
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
known! {
    is_x86_feature_detected:
    "sse3" "ssse3" "sse4.1" "sse4.2" "popcnt" "cmpxchg16b" "aes" "pclmulqdq" "rdrand" "rdseed" "sha" "xsave"
    "avx" "avx2" "f16c" "fma" "bmi1" "bmi2" "lzcnt" "movbe" "adx" "gfni" "vaes" "vpclmulqdq"
    "avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl" "avx512ifma" "avx512vbmi" "avx512vbmi2" "avx512vnni"
    "avx512bitalg" "avx512vpopcntdq" "avx512bf16" "avx512fp16"
}

#[cfg(target_arch = "aarch64")]
known! {
    is_aarch64_feature_detected:
    "aes" "bf16" "crc" "dotprod" "fhm" "fp16" "i8mm" "jsconv" "lse" "rcpc" "rdm" "sha2" "sha3" "sve" "sve2"
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const KNOWN: &[(&str, bool)] = &[];

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn is_present(_name: &str) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_tells_by_its_file_what_it_was_compiled_for() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        keep_mark();
        let told = TargetFeatures::of_program(&own).unwrap();
        assert_eq!(told, TargetFeatures::of_this_program());
        assert_eq!(told.missing(), [""; 0]);
    }

    #[test]
    fn files_without_a_mark_tell_nothing() {
        let told = |parts: &[&[u8]]| {
            let features = TargetFeatures::of_program(&parts.concat())?;
            Some(features.names().join(" "))
        };
        for parts in [
            &[][..],
            &[BEGIN],
            &[BEGIN, b"avx"],
            &[BEGIN, b"avx other text\n"],
        ] {
            assert_eq!(told(parts), None);
        }
        assert_eq!(
            told(&[BEGIN, b"\0", BEGIN, b"avx,\n"]).as_deref(),
            Some("avx")
        );
        assert_eq!(told(&[BEGIN, b"\n"]).as_deref(), Some(""));
    }

    #[test]
    fn what_the_processor_lacks_is_missing() {
        let all = TargetFeatures(KNOWN.iter().map(|(name, _)| (*name).to_owned()).collect());
        assert!(all.missing().iter().all(|name| !is_present(name)));
        let unknown = TargetFeatures(vec!["of-a-later-version".to_owned()]);
        assert!(unknown.missing().is_empty());
    }
}
