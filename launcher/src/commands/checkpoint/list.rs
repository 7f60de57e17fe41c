//! `accel-launch checkpoint list`.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator_manifest::{Checkpoint, CheckpointKind, Place, VerifyLevel};
use serde::Serialize;

use super::{checkpoints_of, wrong_place};
use crate::error::Result;
use crate::text::{age, columns, duration, json, print, size};

pub(super) fn run(place: &Place, as_json: bool) -> Result<ExitCode> {
    let list = List::read(place)?;
    print(&if as_json { json(&list)? } else { list.text() })
}

/// The fields are those of the JSON object.
#[derive(Serialize)]
struct List {
    place: PathBuf,
    /// The content of the text file `latest`.
    latest: Option<u64>,
    checkpoints: Vec<Row>,
    /// Drafts, and what is being removed.
    unfinished: Vec<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    number: u64,
    path: PathBuf,
    /// Whether the manifest is good and all files are there in their lengths.
    whole: bool,
    /// True if a file could not be read, so that the checkpoint may be whole.
    unreadable: bool,
    defects: Vec<String>,
    #[serde(flatten)]
    summary: Option<Summary>,
}

/// What is known where the manifest can be read.
#[derive(Serialize)]
struct Summary {
    step: u64,
    epoch: u64,
    world_size: usize,
    bytes: u64,
    created: u64,
    kind: CheckpointKind,
}

impl List {
    fn read(place: &Place) -> Result<Self> {
        let rows = checkpoints_of(place)?;
        let (latest, unfinished) = match place {
            Place::Checkpoint(_) => (None, Vec::new()),
            Place::Folder(folder) => {
                let unfinished = folder.unfinished();
                let unfinished = unfinished.map_err(|error| wrong_place(place.path(), error))?;
                (folder.latest_hint(), unfinished)
            }
        };
        Ok(Self {
            place: place.path().to_owned(),
            latest,
            checkpoints: rows.iter().map(Row::read).collect(),
            unfinished,
        })
    }

    fn text(&self) -> String {
        if self.checkpoints.is_empty() && self.unfinished.is_empty() {
            return format!("no checkpoints in {}\n", self.place.display());
        }
        let mut table = vec![
            [
                "number", "step", "epoch", "ranks", "size", "age", "kind", "state",
            ]
            .map(str::to_owned),
        ];
        table.extend(self.checkpoints.iter().map(|row| row.cells(self.latest)));
        let mut text = columns(&table);
        let is_there = |number| self.checkpoints.iter().any(|x| x.number == number);
        if let Some(number) = self.latest.filter(|&x| !is_there(x)) {
            text.push_str(&format!(
                "`latest` names checkpoint {number}, which is not there\n"
            ));
        }
        for path in &self.unfinished {
            text.push_str(&format!("unfinished: {}\n", path.display()));
        }
        text
    }
}

impl Row {
    fn read(checkpoint: &Checkpoint) -> Self {
        let report = checkpoint.verify(VerifyLevel::Sizes);
        let summary = checkpoint.manifest().ok().map(|manifest| Summary {
            step: manifest.metadata.step,
            epoch: manifest.metadata.epoch,
            world_size: manifest.metadata.world_size.get(),
            bytes: manifest.bytes(),
            created: manifest.created,
            kind: manifest.metadata.kind,
        });
        Self {
            number: checkpoint.number(),
            path: checkpoint.path().to_owned(),
            whole: report.is_good(),
            unreadable: report.unreadable().is_some(),
            defects: report.defects.iter().map(ToString::to_string).collect(),
            summary,
        }
    }

    fn cells(&self, latest: Option<u64>) -> [String; 8] {
        let found = if self.unreadable {
            "unreadable"
        } else {
            "broken"
        };
        let mut state = match self.defects.as_slice() {
            [] => "sizes ok".to_owned(),
            [defect] => format!("{found}: {defect}"),
            [defect, more @ ..] => format!("{found}: {defect}; and {} more", more.len()),
        };
        if latest == Some(self.number) {
            state = format!("latest, {state}");
        }
        let number = self.number.to_string();
        let Some(summary) = &self.summary else {
            let [a, b, c, d, e, f] = ["-"; 6].map(str::to_owned);
            return [number, a, b, c, d, e, f, state];
        };
        [
            number,
            summary.step.to_string(),
            summary.epoch.to_string(),
            summary.world_size.to_string(),
            size(summary.bytes),
            duration(age(summary.created)),
            summary.kind.to_string(),
            state,
        ]
    }
}
