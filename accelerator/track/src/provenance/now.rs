//! What is no longer as it was when a run was recorded.

use std::path::Path;

use super::diff::diff_provenance;
use super::facts::{HashedFile, Provenance};
use super::files::{digest_folder, hash_file};
use super::git::Repository;
use super::host;
use crate::error::{Error, Kind, Result};

/// The program's path, and a warning where it is another one now.
pub(super) fn program(
    binary: &HashedFile,
    provenance: &Provenance,
) -> Result<(String, Option<String>)> {
    let path = &binary.path;
    let now = hash_file(Path::new(path)).map_err(|error| {
        let commit = provenance
            .commit
            .as_ref()
            .and_then(|commit| commit.hash.as_deref());
        let of = commit.map_or(String::new(), |commit| format!(" from commit {commit}"));
        let what = Error::io("read the program", Path::new(path), error);
        let kind = if what.is_not_found() {
            Kind::NotFound
        } else {
            Kind::Io
        };
        Error::new(kind, format!("{what}: build it again{of}"))
    })?;
    let (was, is) = match (&binary.hash, now.hash) {
        (Some(was), Some(is)) if *was == is => return Ok((path.clone(), None)),
        (Some(was), Some(is)) => (was, is),
        _ => {
            let warning = format!(
                "the hash of the program {path} was not recorded, so nobody knows whether it is the same: it had {} \
                 bytes, and has {}",
                binary.bytes, now.bytes
            );
            return Ok((path.clone(), Some(warning)));
        }
    };
    let changed = changed_since(provenance);
    let why = match changed.is_empty() {
        true => String::new(),
        false => format!("; since then have changed: {}", changed.join(", ")),
    };
    let warning =
        format!("the program {path} was built again: its BLAKE3 sum was {was}, and is {is}{why}");
    Ok((path.clone(), Some(warning)))
}

/// Warns of data and of a machine that are others than they were.
pub(super) fn warn_of_inputs(provenance: &Provenance, warnings: &mut Vec<String>) {
    for (name, was) in &provenance.data {
        match digest_folder(&was.path) {
            Ok(now) if now.hash == was.hash => {}
            Ok(now) => warnings.push(format!(
                "the data {name} in {} is not what it was: {} files of {} bytes then, {} of {} now",
                was.path, was.files, was.bytes, now.files, now.bytes
            )),
            Err(error) => warnings.push(format!("the data {name} cannot be compared: {error}")),
        }
    }
    let now = host::facts();
    let was = &provenance.host;
    for (what, was, now) in [
        ("host", &was.name, &now.name),
        ("processor", &was.cpu, &now.cpu),
        ("operating system", &was.os, &now.os),
        ("kernel", &was.kernel, &now.kernel),
    ] {
        if let (Some(was), Some(now)) = (was, now)
            && was != now
        {
            warnings.push(format!("the {what} was {was}, and is {now}"));
        }
    }
    if let (Some(was), Some(now)) = (was.cores, now.cores)
        && was != now
    {
        warnings.push(format!("the process had {was} cores, and has {now}"));
    }
}

/// The sources and the lock file that are no longer as they were.
fn changed_since(provenance: &Provenance) -> Vec<String> {
    let Some(commit) = &provenance.commit else {
        return Vec::new();
    };
    let root = Path::new(&commit.root);
    let now = Repository::around(root).and_then(|repository| repository.state());
    let Some(now) = now else {
        return Vec::new();
    };
    let lock_file = provenance.lock_file.as_ref();
    let lock_file = lock_file.and_then(|file| hash_file(Path::new(&file.path)).ok());
    let now = Provenance {
        commit: Some(now.commit),
        lock_file,
        ..Provenance::default()
    };
    let differences = diff_provenance(provenance, &now, root)
        .into_iter()
        .map(|found| found.what);
    let of_sources = differences.filter_map(|what| match what.as_str() {
        "lock file" => Some(what),
        _ => what.strip_prefix("source ").map(str::to_owned),
    });
    of_sources.collect()
}
