//! The defaults of a rank's environment: how many threads its pools have, and variables that it gets unless the user has
//! set them.

use std::ffi::OsString;
use std::num::NonZeroUsize;

use accelerator_host::PYTHON_UNBUFFERED;
use accelerator_host::machine::UsableCores;

/// The variables that thread pools read.
pub(crate) const POOL_VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// The fate of one of [`POOL_VARIABLES`] in the environment of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The launcher sets it.
    Set {
        /// Threads of a rank.
        count: NonZeroUsize,
        /// The reason for this count.
        origin: String,
    },
    /// The user has set it, and it is left alone.
    Inherited(String),
    /// It is left unset, for the program to choose.
    Unset,
}

impl Threads {
    /// Decides for a variable whose present value is `inherited`, given the option
    /// `--threads-per-process`, the ranks on this machine and its cores.
    ///
    /// Ranks that each start a thread per core hinder one another, so the cores are divided
    /// between them. A single rank has all cores.
    pub(crate) fn choose(
        option: Option<NonZeroUsize>,
        inherited: Option<String>,
        ranks: NonZeroUsize,
        cores: NonZeroUsize,
    ) -> Self {
        match (option, inherited.filter(|value| !value.is_empty())) {
            (Some(count), _) => Self::Set {
                count,
                origin: "--threads-per-process".into(),
            },
            (None, Some(value)) => Self::Inherited(value),
            (None, None) if ranks.get() == 1 => Self::Unset,
            (None, None) => Self::Set {
                count: share(cores, ranks),
                origin: format!("{cores} cores over {ranks} local ranks"),
            },
        }
    }
}

/// The cores that each of `ranks` processes can have to itself, at least one.
pub(crate) fn share(cores: NonZeroUsize, ranks: NonZeroUsize) -> NonZeroUsize {
    NonZeroUsize::new(cores.get() / ranks.get()).unwrap_or(NonZeroUsize::MIN)
}

/// The cores that this process may use, by its affinity and its control group.
pub(crate) fn cores() -> NonZeroUsize {
    UsableCores::of_this_process().count()
}

/// A variable, its value, and why it has that.
///
/// The first four are settings of glibc's allocator; other allocators do not read them. A training step allocates and
/// frees the same large blocks again and again. By default glibc gives them back to the system, and the kernel zeroes
/// them anew each time: ten to fifteen hundredths of the time of one process that trains, and a fifth to a quarter
/// where two do at the same time, since they wait for each other in the kernel. With the first three it keeps them. The
/// last asks for huge pages if the system gives them on request. Peaks of memory grew by less than a tenth.
pub(crate) const DEFAULTS: [(&str, &str, &str); 5] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296", KEPT),
    ("MALLOC_TOP_PAD_", "67108864", KEPT),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296", KEPT),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", KEPT),
    (
        PYTHON_UNBUFFERED.0,
        PYTHON_UNBUFFERED.1,
        "default: output is shown when it is printed",
    ),
];

const KEPT: &str = "default: ranks keep memory that they freed";

/// Returns the settings for each rank, except those that the user has set (`inherited` returns true). A single process
/// gets them too: it gains as well, and its memory use stays comparable with that of two processes.
pub(crate) fn variables(inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, OsString)> {
    let chosen = DEFAULTS.iter().filter(|(name, ..)| !inherited(name));
    chosen
        .map(|&(name, value, _)| (name, value.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: usize) -> NonZeroUsize {
        NonZeroUsize::new(value).unwrap()
    }

    fn chosen(
        option: Option<usize>,
        inherited: Option<&str>,
        ranks: usize,
        cores: usize,
    ) -> Option<usize> {
        let inherited = inherited.map(str::to_owned);
        match Threads::choose(option.map(number), inherited, number(ranks), number(cores)) {
            Threads::Set { count, .. } => Some(count.get()),
            Threads::Inherited(_) | Threads::Unset => None,
        }
    }

    #[test]
    fn cores_are_divided_between_ranks() {
        assert_eq!(chosen(None, None, 2, 16), Some(8));
        assert_eq!(chosen(None, None, 3, 16), Some(5));
        assert_eq!(chosen(None, Some(""), 8, 2), Some(1));
        assert_eq!(chosen(None, None, 1, 16), None);
    }

    #[test]
    fn the_users_thread_count_wins() {
        assert_eq!(chosen(None, Some("3"), 2, 16), None);
        assert_eq!(chosen(Some(7), Some("3"), 2, 16), Some(7));
        assert_eq!(chosen(Some(7), None, 1, 16), Some(7));
    }

    #[test]
    fn the_users_own_settings_are_left_alone() {
        let names = |inherited: &str| -> Vec<_> {
            variables(|name| name == inherited)
                .into_iter()
                .map(|(name, _)| name)
                .collect()
        };
        assert_eq!(names("").len(), 5);
        let others = names("MALLOC_TOP_PAD_");
        assert_eq!(
            others,
            [
                "MALLOC_MMAP_THRESHOLD_",
                "MALLOC_TRIM_THRESHOLD_",
                "GLIBC_TUNABLES",
                "PYTHONUNBUFFERED"
            ]
        );
    }
}
