//! The end of a manifest: the sum of everything before it.

use crate::error::{Error, Kind, Result};
use crate::hash::ContentHash;

/// Appends the seal to what it is the sum of: an object without its end.
pub(super) fn seal(body: &mut Vec<u8>) {
    let hash = ContentHash::of(body).to_string();
    body.extend_from_slice(SEAL);
    body.extend_from_slice(hash.as_bytes());
    body.extend_from_slice(END);
}

/// Checks that the content is, to the bit, the content that was sealed.
pub(super) fn check_seal(bytes: &[u8]) -> Result<()> {
    let corrupt = |message: &str| Error::new(Kind::Corrupt, message);
    let sealed = bytes.strip_suffix(END).and_then(|rest| {
        let (rest, digits) = rest.split_at_checked(rest.len().checked_sub(DIGITS)?)?;
        Some((rest.strip_suffix(SEAL)?, digits))
    });
    let Some((body, digits)) = sealed else {
        return Err(corrupt(
            "the manifest does not end with its seal: it is cut off, or was edited",
        ));
    };
    // As text: digits in capitals would be the same sum, but not the same bits.
    if ContentHash::of(body).to_string().as_bytes() != digits {
        return Err(corrupt(
            "the seal of the manifest does not fit its content: it was changed after it was written",
        ));
    }
    Ok(())
}

const SEAL: &[u8] = b",\n  \"seal\": \"";
const END: &[u8] = b"\"\n}\n";
const DIGITS: usize = 64;
