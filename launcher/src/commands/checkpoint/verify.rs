//! `accel-launch checkpoint verify`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_manifest::{Checkpoint, Place, VerifyLevel};
use serde::Serialize;

use super::checkpoints_of;
use crate::error::Result;
use crate::text::{json, print, size};

pub(super) fn run(place: &Place, as_json: bool) -> Result<ExitCode> {
    let checkpoints = checkpoints_of(place)?;
    let mut report = VerifyOutput {
        good: !checkpoints.is_empty(),
        checkpoints: Vec::new(),
    };
    for checkpoint in &checkpoints {
        let entry = VerifiedCheckpoint::read(checkpoint);
        report.good &= entry.good;
        if !as_json {
            // One by one, since reading may take its time.
            print(&entry.text())?;
        }
        report.checkpoints.push(entry);
    }
    if as_json {
        print(&json(&report)?)?;
    } else if checkpoints.is_empty() {
        print(&format!("no checkpoints in {}\n", place.path().display()))?;
    }
    Ok(if report.good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct VerifyOutput {
    good: bool,
    checkpoints: Vec<VerifiedCheckpoint>,
}

#[derive(Serialize)]
struct VerifiedCheckpoint {
    number: u64,
    path: PathBuf,
    good: bool,
    /// True if a file could not be read, so that the checkpoint may be good.
    unreadable: bool,
    files: Option<usize>,
    bytes: Option<u64>,
    defects: Vec<Defect>,
    /// Files that the manifest does not list; nothing reads them.
    untracked: Vec<String>,
}

#[derive(Serialize)]
struct Defect {
    file: String,
    what: String,
}

impl VerifiedCheckpoint {
    fn read(checkpoint: &Checkpoint) -> Self {
        let report = checkpoint.verify(VerifyLevel::Hashes);
        let manifest = checkpoint.manifest().ok();
        let defects = report.defects.iter().map(|defect| Defect {
            file: defect.file.clone(),
            what: defect.to_string(),
        });
        Self {
            number: report.number,
            good: report.is_good(),
            unreadable: report.unreadable().is_some(),
            files: manifest.map(|x| x.files.len()),
            bytes: manifest.map(accelerator_manifest::Manifest::bytes),
            defects: defects.collect(),
            untracked: report.untracked,
            path: report.path,
        }
    }

    fn text(&self) -> String {
        let state = match (self.good, self.unreadable) {
            (true, _) => "good",
            (false, true) => "UNREADABLE",
            (false, false) => "BROKEN",
        };
        let mut text = format!("{}: {state}", self.path.display());
        if let (Some(files), Some(bytes)) = (self.files, self.bytes) {
            text.push_str(&format!(" ({files} files, {})", size(bytes)));
        }
        text.push('\n');
        for defect in &self.defects {
            text.push_str(&format!("  {}\n", defect.what));
        }
        for file in &self.untracked {
            text.push_str(&format!("  {file}: not in the manifest (is not read)\n"));
        }
        text
    }
}
