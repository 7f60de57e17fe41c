//! The token of a job: the one that this launcher was given, or one of its own; and the file in which ranks find it.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Once, OnceLock};

use accelerator_collective::rendezvous::Token;
use accelerator_env::{TOKEN_FILE, variable};
use accelerator_manifest::StagedFolder;
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};

use crate::error::{Error, Result, chain};
use crate::text::note;
use crate::variables;

/// The token of `ACCEL_TOKEN_FILE`.
#[derive(Debug)]
pub(crate) struct GivenToken {
    /// The token.
    pub(crate) token: Token,
    /// Where ranks find it, if not where this launcher has.
    pub(crate) file: Option<&'static Path>,
}

/// The token of `ACCEL_TOKEN_FILE`, where that is set. What comes by a pipe is read once in a process.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn given_token() -> Result<Option<GivenToken>> {
    static PIPED: OnceLock<(Token, MemoryFile)> = OnceLock::new();
    static GUESSABLE: Once = Once::new();
    let Some(path) = variables::given(TOKEN_FILE.name).map(PathBuf::from) else {
        return Ok(None);
    };
    if PIPED.get().is_none() {
        let token = Token::from_file(&path).map_err(|error| Error::usage(chain(&error)))?;
        if token.is_guessable() {
            GUESSABLE.call_once(|| note(Token::GUESSABLE));
        }
        if !fs::metadata(&path).is_ok_and(|found| found.file_type().is_fifo()) {
            return Ok(Some(GivenToken { token, file: None }));
        }
        let file = MemoryFile::of_token(token.secret())?;
        // Another thread may have been faster.
        let _ = PIPED.set((token, file));
    }
    Ok(PIPED.get().map(|(token, file)| GivenToken {
        token: token.clone(),
        file: Some(file.path()),
    }))
}

/// A file in memory that only this user can read, and that is gone with this process.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    path: PathBuf,
    _file: File,
}

impl MemoryFile {
    /// A file with the secret of a token.
    ///
    /// # Errors
    /// When the system gives no memory for it.
    pub(crate) fn of_token(secret: &[u8]) -> Result<Self> {
        let write = || -> io::Result<Self> {
            let file = memfd_create("accel-token", MemfdFlags::CLOEXEC)?;
            fchmod(&file, Mode::RUSR | Mode::WUSR)?;
            let mut file = File::from(file);
            file.write_all(secret)?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            Ok(Self {
                path: path.into(),
                _file: file,
            })
        };
        write().map_err(|error| Error::system("the token cannot be kept").with_source(error))
    }

    /// Its path, for other processes of this user.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The file of a token for one attempt, which only this user can read; it goes when this is dropped. That of a
/// launcher that was killed goes with the next.
#[derive(Debug)]
pub(crate) struct OwnToken {
    path: PathBuf,
    _folder: StagedFolder,
}

impl OwnToken {
    /// A new token, and its file.
    ///
    /// # Errors
    /// When the folder for temporary files cannot be written.
    pub(crate) fn make() -> Result<(Token, Self)> {
        let unwritable = |error: &dyn std::error::Error| {
            Error::system(format!(
                "no token can be made for this job in {}; name another folder in TMPDIR, or a token in \
                 ACCEL_TOKEN_FILE: {}",
                temporary().display(),
                chain(error)
            ))
        };
        // Ranks may change their working folder.
        let temporary = std::path::absolute(temporary());
        // Other users have theirs in the same folder.
        let name = format!("accel-token-{}", rustix::process::getuid().as_raw());
        let folder = temporary
            .and_then(|parent| StagedFolder::create(&parent, &name, |target| target == name))
            .and_then(|folder| {
                fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).map(|()| folder)
            })
            .map_err(|error| unwritable(&error))?;
        let path = folder.path().join("token");
        let token = Token::generate().map_err(|error| unwritable(&error))?;
        let written = token.write_file(&path);
        written.map_err(|error| unwritable(&error))?;
        let file = Self {
            path,
            _folder: folder,
        };
        Ok((token, file))
    }

    /// Where ranks find it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The folder for temporary files.
fn temporary() -> PathBuf {
    variable("TMPDIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}
