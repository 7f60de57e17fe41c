//! The shared secret of a job.

use std::{
    fmt, fs,
    io::{self, Read, Write},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{Mode, OFlags},
};

use crate::error::{Error, Kind, Result};
use crate::socket::timespec;

/// A secret that the ranks of a job share. It is proved by challenge and never sent.
///
/// ```
/// use accelerator_collective::internal::Token;
///
/// # fn main() -> accelerator_collective::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("token");
/// let token = Token::generate()?;
/// token.write_file(&path)?; // readable by this user only
/// assert!(Token::from_file(&path).is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// A new random token.
    ///
    /// # Errors
    ///
    /// An I/O error where the operating system gives no random bytes.
    pub fn generate() -> Result<Self> {
        Ok(Self(hex(&random()?).into_bytes()))
    }

    /// Reads the token that a file holds; white space around it does not count.
    ///
    /// The file is private to its owner. A secret that an engine mounts in memory may be readable by a group: one of
    /// root's on a `tmpfs` with mode 0440, as Kubernetes mounts it with `fsGroup`. It may be a pipe that this process has inherited,
    /// such as `/dev/fd/3`: what was written to it is read once, and within 10 seconds. Ranks of `accel-launch` get it
    /// in a file of their own then.
    ///
    /// # Errors
    ///
    /// An unauthorized error where the file cannot be read, may be read by other users too, or
    /// holds fewer than 16 bytes or more than 4096.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(path.as_ref(), PIPE_TIMEOUT)
    }

    fn read(path: &Path, limit: Duration) -> Result<Self> {
        let read = fs::metadata(path).and_then(|found| {
            // Anything else could keep this waiting for ever when it is opened.
            if !found.is_file() && !is_pipe(&found) {
                return Err(io::Error::other("it is neither a regular file nor a pipe"));
            }
            let file = fs::File::from(rustix::fs::open(
                path,
                OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
                Mode::empty(),
            )?);
            check_privacy(&file)?;
            match is_pipe(&found) {
                true => read_pipe(file, limit),
                false => read_all(file),
            }
        });
        let text = read.map_err(|error| {
            Error::caused(
                Kind::Unauthorized,
                format!(
                    "the token file {} cannot be read; ACCEL_TOKEN_FILE names the file that holds \
                     the job token. That of `accel-launch` lies in its folder for temporary files: ranks \
                     that run as another user, or see other folders, need a file of your own",
                    path.display()
                ),
                error,
            )
        })?;
        let token = text.trim_ascii();
        if token.len() < MIN_TOKEN_BYTES || text.len() > MAX_TOKEN_BYTES {
            return Err(Error::unauthorized(format!(
                "the token file {} holds {} bytes; expected {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}",
                path.display(),
                token.len()
            )));
        }
        Ok(Self(token.to_vec()))
    }

    /// Returns true if the token may be guessed: it is printable, and too short to hold 16 random bytes in its letters
    /// or digits. Anyone who records a handshake can try any number of guesses.
    pub fn is_guessable(&self) -> bool {
        const ENOUGH_BITS: usize = 128;
        let all = |is_of: fn(&u8) -> bool| self.0.iter().all(is_of);
        let bits_each = match () {
            () if all(u8::is_ascii_digit) => 3,
            () if all(u8::is_ascii_hexdigit) => 4,
            // As many as letters of Base64 hold; random bytes are hardly ever a text.
            () => match std::str::from_utf8(&self.0) {
                Ok(text) => return text.chars().count() * 6 < ENOUGH_BITS,
                Err(_) => 8,
            },
        };
        self.0.len() * bits_each < ENOUGH_BITS
    }

    /// The warning about a [guessable](Self::is_guessable) token.
    pub const GUESSABLE: &'static str = "the token of ACCEL_TOKEN_FILE may be guessed, as it is a short text: make one of \
         random bytes, such as by `openssl rand -hex 32`";

    /// Writes the token to a new file that only this user may read.
    ///
    /// # Errors
    ///
    /// An I/O error where the file exists or cannot be written.
    pub fn write_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options
            .open(path)
            .and_then(|mut file| {
                file.write_all(&self.0)?;
                file.write_all(b"\n")
            })
            .map_err(|error| {
                Error::io(
                    format!("the token file {} cannot be written", path.display()),
                    error,
                )
            })
    }

    /// The proof that a holder of this token says `parts`, in this order, in `role`: their keyed BLAKE3 hash.
    ///
    /// A protocol that proves it by challenge puts the other side's [nonce](Self::nonce) among the parts, and gives
    /// each side a role of its own.
    ///
    /// ```
    /// use accelerator_collective::internal::Token;
    ///
    /// # fn main() -> accelerator_collective::Result<()> {
    /// let token = Token::generate()?;
    /// let nonce = Token::nonce()?;
    /// let proof = token.prove("server", &[&nonce]);
    /// assert!(token.accepts("server", &[&nonce], &proof));
    /// assert!(!token.accepts("client", &[&nonce], &proof));
    /// # Ok(())
    /// # }
    /// ```
    pub fn prove(&self, role: &str, parts: &[&[u8]]) -> [u8; 32] {
        self.key().prove(role, parts)
    }

    /// Checks if `proof` is that of a holder of this token, for these parts in this role; takes equally long for every
    /// proof.
    pub fn accepts(&self, role: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.key().accepts(role, parts, proof)
    }

    /// Thirty-two random bytes, which a challenge asks to be proved.
    ///
    /// # Errors
    ///
    /// An I/O error where the operating system gives no random bytes.
    pub fn nonce() -> Result<[u8; 32]> {
        random()
    }

    /// The secret itself, for who hands it on by a way that nobody else can read.
    pub fn secret(&self) -> &[u8] {
        &self.0
    }

    /// The text of a token that was [generated](Self::generate).
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// Restores a token from its [secret](Self::secret), as another process handed it on; returns `None` for fewer than
    /// 16 or more than 4096 bytes.
    pub fn from_secret(secret: &[u8]) -> Option<Self> {
        (MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES)
            .contains(&secret.len())
            .then(|| Self(secret.into()))
    }

    pub(crate) fn key(&self) -> Key {
        Key(blake3::derive_key(TOKEN_KEY, &self.0))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A key for proofs: that of a token, or that of one job.
#[derive(Clone)]
pub(crate) struct Key([u8; blake3::KEY_LEN]);

impl Key {
    /// The key of a job, from the secret of its store and the key of its token where it has one.
    pub(crate) fn of_job(secret: &[u8; 32], token: Option<&Self>) -> Self {
        let token = token.map_or(&[][..], |key| &key.0);
        Self(blake3::derive_key(JOB_KEY, &[secret, token].concat()))
    }

    /// Derives a token that only holders of this key can derive.
    pub(crate) fn token(&self, purpose: &str) -> Token {
        Token(hex(&self.prove("token", &[purpose.as_bytes()])).into_bytes())
    }

    /// The proof that the holder of this key said these parts, in this order, in this role.
    pub(crate) fn prove(&self, role: &str, parts: &[&[u8]]) -> Proof {
        self.mac(role, parts).into()
    }

    /// Checks a proof in constant time.
    pub(crate) fn accepts(&self, role: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(role, parts) == *proof
    }

    fn mac(&self, role: &str, parts: &[&[u8]]) -> blake3::Hash {
        let mut mac = blake3::Hasher::new_keyed(&self.0);
        for part in std::iter::once(&role.as_bytes()).chain(parts) {
            // Lengths keep the borders between the parts apart.
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac.finalize()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::caused(
            Kind::Io,
            "the operating system gives no random bytes",
            error,
        )
    })?;
    Ok(bytes)
}

pub(crate) type Proof = [u8; 32];

fn is_pipe(found: &fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_fifo(&found.file_type())
}

fn read_all(file: fs::File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(MAX_TOKEN_BYTES as u64 + 1)
        .read_to_end(&mut text)?;
    Ok(text)
}

/// Reads from a pipe until it is closed or a line ends.
fn read_pipe(mut pipe: fs::File, limit: Duration) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + limit;
    let mut text = Vec::new();
    while text.len() <= MAX_TOKEN_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if poll(
            &mut [PollFd::new(&pipe, PollFlags::IN)],
            Some(&timespec(left)),
        )? == 0
        {
            return Err(io::Error::other("nothing was written to the pipe in time"));
        }
        let mut bytes = [0; 512];
        let count = match pipe.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            read => read?,
        };
        text.extend_from_slice(&bytes[..count]);
        if count == 0 && text.is_empty() {
            return Err(io::Error::other(
                "the pipe is empty and closed; a token is read from it once, by one process",
            ));
        }
        if count == 0 || text.trim_ascii_start().contains(&b'\n') {
            break;
        }
    }
    Ok(text)
}

/// A secret that other users can read, or replace, is none.
fn check_privacy(file: &fs::File) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let found = file.metadata()?;
    let mode = found.permissions().mode() & 0o777;
    let is_mounted = || mode == 0o440 && found.uid() == 0 && is_in_memory(file);
    if mode & 0o077 == 0 || is_mounted() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "other users have access to it, its mode is {mode:03o}; run chmod 600 on it, and \
         make a new token if somebody may have read this one (in a Secret of Kubernetes: defaultMode 0400)"
    )))
}

/// Checks if a file is on a `tmpfs`, as secrets that an engine mounts are.
fn is_in_memory(file: &fs::File) -> bool {
    #[cfg(target_os = "linux")]
    {
        /// `TMPFS_MAGIC` of statfs(2).
        const TMPFS: rustix::fs::FsWord = 0x0102_1994;
        rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type == TMPFS)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// BLAKE3's context strings, one per kind of key.
const TOKEN_KEY: &str = "accelerator-collective 2026 key of a token";
const JOB_KEY: &str = "accelerator-collective 2026 key of a job";

const MIN_TOKEN_BYTES: usize = 16;
const MAX_TOKEN_BYTES: usize = 4096;
/// The longest time that a token may take through a pipe.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::{Rendezvous, StoreOptions, StoreServer};

    #[test]
    fn proofs_hold_for_their_parts_only() {
        let key = Token::generate().unwrap().key();
        let proof = key.prove("store", &[b"ab", b"c"]);
        assert!(key.accepts("store", &[b"ab", b"c"], &proof));
        assert!(!key.accepts("store", &[b"a", b"bc"], &proof));
        assert!(!key.accepts("rank", &[b"ab", b"c"], &proof));
        assert!(!key.accepts("store", &[b"ab", b"c"], &proof[..31]));
        assert!(!key.accepts("store", &[b"ab", b"c"], &[]));
        let other = Token::generate().unwrap().key();
        assert!(!other.accepts("store", &[b"ab", b"c"], &proof));
    }

    #[test]
    fn a_job_has_a_key_of_its_own() {
        let token = Token::generate().unwrap().key();
        let keys = [
            token.clone(),
            Key::of_job(&[1; 32], Some(&token)),
            Key::of_job(&[2; 32], Some(&token)),
            Key::of_job(&[1; 32], None),
        ];
        for (number, key) in keys.iter().enumerate() {
            assert!(keys[..number].iter().all(|other| other.0 != key.0));
        }
    }

    #[test]
    fn files_keep_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        assert!(Token::from_file(&path).unwrap_err().is_unauthorized());
        let token = Token::generate().unwrap();
        token.write_file(&path).unwrap();
        assert_eq!(Token::from_file(&path).unwrap().0, token.0);
        assert!(token.write_file(&path).unwrap_err().is_io());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let short = folder.path().join("short");
        Token(b"  hunter2".to_vec()).write_file(&short).unwrap();
        let error = Token::from_file(&short).unwrap_err();
        assert!(error.to_string().contains("7 bytes"), "{error}");
        let long = folder.path().join("long");
        Token(vec![b'x'; MAX_TOKEN_BYTES + 1])
            .write_file(&long)
            .unwrap();
        let error = Token::from_file(&long).unwrap_err();
        assert!(error.to_string().contains("4097 bytes"), "{error}");
    }

    #[test]
    fn a_short_text_may_be_guessed() {
        for (token, expected) in [
            (&b"correct horse ba"[..], true),
            ("Grüße aus Köln!".as_bytes(), true),
            (b"0123456789abcdef", true),
            (b"0123456789012345678901234567890123456789", true),
            (b"00112233445566778899aabbccddeeff", false),
            (b"yv66vt6tvu8AESIzRFVmdw==", false),
            (
                b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\xff",
                false,
            ),
        ] {
            assert_eq!(Token(token.to_vec()).is_guessable(), expected, "{token:?}");
        }
    }

    #[test]
    fn nothing_prints_a_token() {
        let token = Token::generate().unwrap();
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_eq!(format!("{:?}", token.key()), "Key(..)");
        let secret = String::from_utf8(token.0.clone()).unwrap();
        let bytes = format!("{:?}", token.0);
        let options = StoreOptions::new(2).with_token(token.clone());
        let rendezvous = Rendezvous::new("127.0.0.1", 1).with_token(token.clone());
        let store = StoreServer::bind(("127.0.0.1", 0), 2, Some(token)).unwrap();
        for shown in [
            format!("{options:?}"),
            format!("{rendezvous:?}"),
            format!("{store:?}"),
        ] {
            assert!(shown.contains("Token(..)"), "{shown}");
            assert!(
                !shown.contains(&secret) && !shown.contains(&bytes),
                "{shown}"
            );
        }
    }

    #[test]
    fn a_pipe_gives_its_token_once() {
        use std::os::fd::AsRawFd;
        let token = Token::generate().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let (path, limit) = (Path::new(&path), Duration::from_millis(100));
        let error = Token::read(path, limit).unwrap_err().to_string();
        assert!(error.contains("in time"), "{error}");
        // A line is enough; whoever writes may keep the pipe open.
        writer
            .write_all(format!("{}\n", token.text()).as_bytes())
            .unwrap();
        assert_eq!(Token::from_file(path).unwrap().0, token.0);
        writer.write_all(&token.0).unwrap();
        drop(writer);
        assert_eq!(Token::from_file(path).unwrap().0, token.0);
        let error = Token::from_file(path).unwrap_err().to_string();
        assert!(error.contains("read from it once"), "{error}");
    }

    #[test]
    fn a_pipe_that_nobody_writes_to_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = Token::read(&pipe, Duration::from_millis(50)).unwrap_err();
        assert!(error.is_unauthorized(), "{error}");
    }

    /// Kubernetes mounts secrets so with `fsGroup`; elsewhere a group that can read one is a leak.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_secret_that_an_engine_mounts_may_be_readable_by_its_group() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let memory = Path::new("/dev/shm");
        let Ok(folder) = tempfile::tempdir_in(memory) else {
            return;
        };
        let path = folder.path().join("token");
        Token::generate().unwrap().write_file(&path).unwrap();
        let is_of_root = fs::metadata(&path).unwrap().uid() == 0;
        let file = fs::File::open(&path).unwrap();
        for (mode, accepted) in [
            (0o440, is_of_root && is_in_memory(&file)),
            (0o400, true),
            (0o444, false),
            (0o640, false),
            (0o460, false),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Token::from_file(&path).is_ok(), accepted, "{mode:03o}");
        }
    }
}
