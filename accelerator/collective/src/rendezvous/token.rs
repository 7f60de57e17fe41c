//! The shared secret of a job.

use std::{
    fmt, fs,
    io::{Read, Write},
    path::Path,
};

use crate::error::{Error, Kind, Result};

/// A secret that the ranks of a job share. It is proved by challenge and never sent.
///
/// ```
/// use accelerator_collective::rendezvous::Token;
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
    /// # Errors
    ///
    /// An unauthorized error where the file cannot be read, may be read by other users too, or
    /// holds fewer than 16 bytes or more than 4096.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut text = Vec::new();
        // Anything but a file could keep this waiting for ever when it is opened.
        let read = fs::metadata(path)
            .and_then(|found| match found.is_file() {
                true => fs::File::open(path),
                false => Err(std::io::Error::other("it is not a regular file")),
            })
            .and_then(|file| {
                check_privacy(&file)?;
                file.take(MAX_TOKEN_BYTES as u64 + 1).read_to_end(&mut text)
            });
        if let Err(error) = read {
            return Err(Error::caused(
                Kind::Unauthorized,
                format!(
                    "the token file {} cannot be read; ACCEL_TOKEN_FILE names the file that holds \
                     the job token. That of `accel-launch` lies in its folder for temporary files: ranks \
                     that run as another user, or see other folders, need a file of your own",
                    path.display()
                ),
                error,
            ));
        }
        let token = text.trim_ascii();
        if token.len() < MIN_TOKEN_BYTES || text.len() > MAX_TOKEN_BYTES {
            return Err(Error::new(
                Kind::Unauthorized,
                format!(
                    "the token file {} holds {} bytes; expected {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}",
                    path.display(),
                    token.len()
                ),
            ));
        }
        Ok(Self(token.to_vec()))
    }

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
    /// use accelerator_collective::rendezvous::Token;
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

    /// Whether `proof` is that of a holder of this token, for these parts in this role; takes the same time for every
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

/// Thirty-two random bytes.
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

/// A secret that other users can read, or replace, is none.
#[cfg(unix)]
fn check_privacy(file: &fs::File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = file.metadata()?.permissions().mode() & 0o777;
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(std::io::Error::other(format!(
            "other users have access to it, its mode is {mode:03o}; run chmod 600 on it, and \
             make a new token if somebody may have read this one"
        ))),
    }
}

#[cfg(not(unix))]
fn check_privacy(_file: &fs::File) -> std::io::Result<()> {
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What keys are derived for: BLAKE3's context strings.
const TOKEN_KEY: &str = "accelerator-collective 2026 key of a token";
const JOB_KEY: &str = "accelerator-collective 2026 key of a job";

const MIN_TOKEN_BYTES: usize = 16;
const MAX_TOKEN_BYTES: usize = 4096;

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
    #[cfg(unix)]
    fn a_token_file_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        Token::generate().unwrap().write_file(&path).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = Token::from_file(&path).unwrap_err();
            assert!(error.is_unauthorized());
            let text = error.to_string();
            assert!(text.contains("chmod 600"), "{text}");
            assert!(text.contains(&format!("{mode:03o}")), "{text}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert!(Token::from_file(&path).is_ok());
    }
}
