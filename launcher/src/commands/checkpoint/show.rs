//! `accel-launch checkpoint show`.

use std::process::ExitCode;

use accelerator_manifest::{Checkpoint, LoaderState, Manifest};

use super::unreadable;
use crate::error::Result;
use crate::text::{age, columns, duration, json, print, short, size};

pub(super) fn run(checkpoint: &Checkpoint, as_json: bool) -> Result<ExitCode> {
    let manifest = checkpoint.manifest();
    let manifest = manifest.map_err(|error| unreadable(checkpoint, error))?;
    print(&if as_json {
        json(manifest)?
    } else {
        text(checkpoint, manifest)
    })
}

fn text(checkpoint: &Checkpoint, manifest: &Manifest) -> String {
    let metadata = &manifest.metadata;
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
    row("checkpoint", checkpoint.path().display().to_string());
    row("number", checkpoint.number().to_string());
    if manifest.number != checkpoint.number() {
        row("written as", manifest.number.to_string());
    }
    row("kind", metadata.kind.to_string());
    row("age", duration(age(manifest.created)));
    row(
        "library",
        format!("{} (format {})", manifest.library, manifest.format),
    );
    row("step", metadata.step.to_string());
    row("epoch", metadata.epoch.to_string());
    row("ranks", metadata.world_size.to_string());
    row(
        "seed",
        metadata
            .seed
            .map_or_else(|| "none".to_owned(), |x| x.to_string()),
    );
    for (index, loader) in metadata.loaders.iter().enumerate() {
        row(&format!("loader {index}"), loader_text(loader));
    }
    if !metadata.parameters.is_empty() {
        let elements = metadata
            .parameters
            .iter()
            .map(|x| x.shape.iter().fold(1, |a, &b| b.saturating_mul(a)));
        let elements = elements.fold(0_u64, u64::saturating_add);
        row(
            "parameters",
            format!("{} with {elements} elements", metadata.parameters.len()),
        );
    }
    for (name, value) in &metadata.extra {
        row(name, short(&value.to_string()));
    }
    let mut text = columns(&rows);

    let count = manifest.files.len();
    text.push_str(&format!("\n{count} files, {}\n", size(manifest.bytes())));
    let mut files = vec![["name", "size", "role", "blake3"].map(str::to_owned)];
    files.extend(manifest.files.iter().map(|(name, entry)| {
        let sum = entry.blake3.to_string();
        [
            name.to_string(),
            size(entry.bytes),
            entry.role.to_string(),
            sum,
        ]
    }));
    text + &columns(&files)
}

fn loader_text(loader: &LoaderState) -> String {
    let state = if loader.finished { ", finished" } else { "" };
    format!(
        "epoch {}: {} of {} samples in {} batches of {}, {}, tail {}{state}",
        loader.epoch,
        loader.consumed,
        loader.samples,
        loader.step,
        loader.global_batch,
        loader.order,
        loader.tail,
    )
}
