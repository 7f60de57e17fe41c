use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Where a trace goes: a regular file, or one that is not there, in a folder that takes files.
#[derive(Clone, Debug)]
pub(crate) struct Place(PathBuf);

impl Place {
    /// Finds out whether a trace can be written there, before there is anything to lose. A symbolic
    /// link stays, and its target is replaced.
    ///
    /// # Errors
    ///
    /// What stands in the way.
    pub(crate) fn find(path: &Path) -> io::Result<Self> {
        let path = match fs::metadata(path) {
            Ok(found) if found.is_dir() => {
                return Err(io::Error::other("it is a folder: name a file in it"));
            }
            // A device or a pipe would be replaced, not written to.
            Ok(found) if !found.is_file() => {
                return Err(io::Error::other("it is there and not a regular file"));
            }
            Ok(_) => path.canonicalize()?,
            Err(_) if fs::symlink_metadata(path).is_ok() => {
                return Err(io::Error::other("it is a link to a file that is not there"));
            }
            Err(_) => path.to_owned(),
        };
        let place = Self(path);
        drop(place.open()?);
        Ok(place)
    }

    /// Puts a file there, complete or not at all. Nothing else is left, whatever fails.
    pub(super) fn fill(
        &self,
        write: impl FnOnce(&mut BufWriter<&mut NamedTempFile>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut file = self.open()?;
        let mut buffered = BufWriter::new(&mut file);
        write(&mut buffered)?;
        buffered.flush()?;
        drop(buffered);
        file.as_file().sync_all()?;
        file.persist(&self.0)?;
        Ok(())
    }

    /// A file of a name of its own, in the same folder, so that renaming it is atomic.
    fn open(&self) -> io::Result<NamedTempFile> {
        let folder = match self.0.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".trace-");
        // As any file of the user's, and not for the user alone.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        builder.tempfile_in(folder)
    }
}

/// Where a rank puts its own part when it cannot give it to rank 0.
pub(super) fn of_rank(path: &Path, rank: usize) -> PathBuf {
    path.with_extension(format!("rank{rank}.json"))
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn fill(place: &Place, text: &[u8]) -> io::Result<()> {
        place.fill(|file| file.write_all(text))
    }

    #[test]
    fn nothing_but_a_regular_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        assert!(Place::find(folder.path()).is_err());
        assert!(Place::find(Path::new("/dev/null")).is_err());
        assert!(Place::find(&folder.path().join("none/trace.json")).is_err());
        let link = folder.path().join("link.json");
        symlink("trace.json", &link).unwrap();
        assert!(Place::find(&link).is_err());

        fill(&Place::find(&path).unwrap(), b"one").unwrap();
        fill(&Place::find(&link).unwrap(), b"two").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_cannot_be_written_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let place = Place::find(&path).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        fill(&place, b"one").unwrap();
        let failed = place.fill(|file| {
            file.write_all(b"two")?;
            Err(io::Error::other("the disk is full"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn jobs_that_share_a_place_do_not_spoil_it() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::find(&folder.path().join("trace.json")).unwrap();
        let outer = place.fill(|file| {
            file.write_all(b"one")?;
            fill(&place, b"two")
        });
        outer.unwrap();
        assert_eq!(fs::read(&place.0).unwrap(), b"one");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
