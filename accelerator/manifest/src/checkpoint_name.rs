//! Names within a folder of checkpoints, and the file that names the newest.

use std::io;
use std::path::Path;

use crate::staged::{StagedName, State, try_lock};
use crate::vfs::Vfs;

/// `checkpoint-000003`.
pub(crate) fn name_of(number: u64) -> String {
    format!("checkpoint-{number:06}")
}

/// The number of `checkpoint-000003`; only as [`name_of`] writes it, so that no two names are one
/// number.
pub(crate) fn parse_name(name: &str) -> Option<u64> {
    let number = name.strip_prefix("checkpoint-")?.parse().ok()?;
    let is_number = (1..=LARGEST).contains(&number) && name_of(number) == name;
    is_number.then_some(number)
}

/// A hidden name for a checkpoint, or for the hint at the newest.
pub(crate) fn temporary(what: &str, state: State) -> String {
    StagedName::new(what, state).to_string()
}

/// Checks if this is the name of something unfinished in a folder of checkpoints.
pub(crate) fn is_leftover(name: &str) -> bool {
    StagedName::parse(name).is_some_and(|staged| is_ours(&staged))
}

/// Checks if [`temporary`] made this name for something that a folder of checkpoints has.
pub(crate) fn is_ours(staged: &StagedName) -> bool {
    staged.target() == LATEST || parse_name(staged.target()).is_some()
}

/// Replaces the text file `latest`, all of it or nothing.
pub(crate) fn point_latest(vfs: &Vfs, folder: &Path, number: u64) -> io::Result<()> {
    let draft = folder.join(temporary(LATEST, State::Partial));
    let replace = || {
        let mut file = vfs.create(&draft)?;
        // The draft exists for a moment only; if it is swept before it is locked, the rename fails.
        let _lock = try_lock(&draft);
        vfs.write(
            &draft,
            &mut file,
            format!("{}\n", name_of(number)).as_bytes(),
        )?;
        vfs.sync(&draft, &file)?;
        vfs.rename(&draft, &folder.join(LATEST))?;
        vfs.sync_folder(folder)
    };
    replace().inspect_err(|_| {
        let _ = vfs.remove_file(&draft);
    })
}

pub(crate) const LATEST: &str = "latest";

/// The largest number of a checkpoint.
pub(crate) const LARGEST: u64 = 999_999_999_999_999_999;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_name_each() {
        for (name, number) in [
            ("checkpoint-000001", 1),
            ("checkpoint-999999", 999_999),
            ("checkpoint-1000000", 1_000_000),
        ] {
            assert_eq!(parse_name(name), Some(number));
            assert_eq!(name_of(number), name);
        }
        for name in [
            "checkpoint-000000",
            "checkpoint-1",
            "checkpoint-0000001",
            "checkpoint-+00001",
            "checkpoint-",
            "Checkpoint-000001",
            "checkpoint-000001 ",
            "checkpoint-1000000000000000000",
            "checkpoint-00000x",
            "latest",
        ] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn only_temporary_names_of_ours_are_leftovers() {
        assert!(is_leftover(&temporary("checkpoint-000003", State::Partial)));
        assert!(is_leftover(&temporary(LATEST, State::Partial)));
        assert!(is_leftover(&temporary("checkpoint-000003", State::Removed)));
        for name in [
            "checkpoint-000003",
            ".checkpoint-000003.partial",
            ".notes.partial-01234567-1-0123456789abcdef",
            ".checkpoint-3.partial-01234567-1-0123456789abcdef",
            ".x.checkpoint-000003.partial-01234567-1-0123456789abcdef",
        ] {
            assert!(!is_leftover(name), "{name}");
        }
    }
}
