//! The operations that change the file system, one function each, so that tests can stop between any two.

use std::fs::{self, File};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

use accelerator_host::fs::sync_folder;

/// The number of bytes that are read, written or summed up at a time, after which progress is shown.
pub(crate) const BLOCK: usize = 1 << 20;

/// A change that is about to be made.
#[derive(Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only hooks look at the paths"))]
pub(crate) enum Step<'a> {
    MakeFolder(&'a Path),
    Create(&'a Path),
    Write(&'a Path),
    Sync(&'a Path),
    SyncFolder(&'a Path),
    Rename(&'a Path, &'a Path),
    Remove(&'a Path),
}

/// The file system; in tests, one whose operations can be made to fail.
#[derive(Clone, Default)]
pub(crate) struct Vfs {
    hook: Option<Arc<Hook>>,
    /// Told of each step.
    pub(crate) progress: Progress,
}

/// Called before each step. Its error stands for one of the system.
type Hook = dyn Fn(&Step<'_>) -> io::Result<()> + Send + Sync + UnwindSafe + RefUnwindSafe;

impl Vfs {
    #[cfg(test)]
    pub(crate) fn hooked(
        hook: impl Fn(&Step<'_>) -> io::Result<()> + Send + Sync + UnwindSafe + RefUnwindSafe + 'static,
    ) -> Self {
        Self {
            hook: Some(Arc::new(hook)),
            progress: Progress::default(),
        }
    }

    /// Fails where the folder exists.
    pub(crate) fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.ask(&Step::MakeFolder(path))?;
        fs::create_dir(path)
    }

    /// Fails where the file exists.
    pub(crate) fn create(&self, path: &Path) -> io::Result<File> {
        self.ask(&Step::Create(path))?;
        File::options().write(true).create_new(true).open(path)
    }

    pub(crate) fn write(&self, path: &Path, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        self.ask(&Step::Write(path))?;
        io::Write::write_all(file, bytes)?;
        self.progress.tick();
        Ok(())
    }

    pub(crate) fn sync(&self, path: &Path, file: &File) -> io::Result<()> {
        // A test's machine loses what was not flushed by itself, and much faster.
        match &self.hook {
            Some(hook) => hook(&Step::Sync(path)),
            None => file.sync_all(),
        }?;
        self.progress.tick();
        Ok(())
    }

    /// Makes the names in a folder last.
    pub(crate) fn sync_folder(&self, path: &Path) -> io::Result<()> {
        match &self.hook {
            Some(hook) => hook(&Step::SyncFolder(path)),
            None => sync_folder(path),
        }?;
        self.progress.tick();
        Ok(())
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.ask(&Step::Rename(from, to))?;
        fs::rename(from, to)
    }

    pub(crate) fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.ask(&Step::Remove(path))?;
        fs::remove_file(path)
    }

    /// Removes a folder with all that is in it; links in it are removed, not followed.
    pub(crate) fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.ask(&Step::Remove(path))?;
        fs::remove_dir_all(path)
    }

    /// Removes a file, or a folder with all that is in it. A link is removed itself, not what it points to.
    pub(crate) fn remove_any(&self, path: &Path) -> io::Result<()> {
        if fs::symlink_metadata(path)?.is_dir() {
            self.remove_folder(path)
        } else {
            self.remove_file(path)
        }
    }

    /// Removes an empty folder.
    pub(crate) fn remove_empty(&self, path: &Path) -> io::Result<()> {
        self.ask(&Step::Remove(path))?;
        fs::remove_dir(path)
    }

    fn ask(&self, step: &Step<'_>) -> io::Result<()> {
        // That of the step before.
        self.progress.tick();
        match &self.hook {
            Some(hook) => hook(step),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Vfs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vfs").finish_non_exhaustive()
    }
}

/// Called after each block of a file that was read, summed up, written or flushed.
#[derive(Clone, Default)]
pub(crate) struct Progress(Option<Arc<Callback>>);

type Callback = dyn Fn() + Send + Sync + UnwindSafe + RefUnwindSafe;

impl Progress {
    pub(crate) fn new(
        callback: impl Fn() + Send + Sync + UnwindSafe + RefUnwindSafe + 'static,
    ) -> Self {
        Self(Some(Arc::new(callback)))
    }

    pub(crate) fn tick(&self) {
        if let Some(callback) = &self.0 {
            callback();
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").finish_non_exhaustive()
    }
}
