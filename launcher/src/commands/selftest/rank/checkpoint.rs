//! A damaged checkpoint is found, and the one before it used.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use accelerator_manifest::{FileName, Folder, Metadata, Role, VerifyLevel};

use super::{Contribution, Result};

/// Writes two checkpoints, flips a bit of the second, and looks for the newest good one.
pub(super) fn check(folder: &Path, contribution: Contribution) -> Result<String> {
    let folder = Folder::create(folder.join("checkpoints"))?;
    let name: FileName = "weights.bin".parse()?;
    let mut saved = Vec::new();
    for step in [10, 20] {
        let mut draft = folder.begin(0)?;
        draft.write_bytes(&name, Role::Model, &content(step))?;
        saved.push(draft.commit(Metadata {
            step,
            ..Metadata::new(NonZeroUsize::MIN)
        })?);
    }
    let newest = expect_found(&folder, &name, 20)?;
    let last = saved.last().ok_or("nothing was saved")?;
    if newest != last.number() {
        return Err(format!("expected number {}, found {newest}", last.number()).into());
    }
    if !contribution.is_wrong() {
        let path = last.path_of(&name);
        let mut bytes = fs::read(&path)?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes)?;
    }
    let report = last.verify(VerifyLevel::Hashes);
    if !report
        .defects
        .iter()
        .any(|defect| defect.file == name.as_str())
    {
        return Err(format!("a flipped bit of {name} was not found: {report}").into());
    }
    expect_found(&folder, &name, 10)?;
    Ok("a flipped bit was found, and the checkpoint before it used".to_owned())
}

/// The newest good checkpoint must be of this step; gives its number.
fn expect_found(folder: &Folder, name: &FileName, step: u64) -> Result<u64> {
    let found = folder.latest_good()?.found;
    let found = found.ok_or("no good checkpoint was found")?;
    let metadata = &found.manifest()?.metadata;
    if metadata.step != step {
        return Err(format!(
            "expected the checkpoint of step {step}, found {}",
            metadata.step
        )
        .into());
    }
    if found.read(name)? != content(step) {
        return Err(format!("the checkpoint of step {step} holds something else").into());
    }
    Ok(found.number())
}

fn content(step: u64) -> Vec<u8> {
    let numbers = (0..10_000).map(|index| index * step);
    numbers.flat_map(u64::to_le_bytes).collect()
}
