//! Texts, histograms, images and plots on a page.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use crate::history::{Media, MediaContent, RunHistory};
use crate::record::Number;

/// Media that was logged under a key, at some of its steps.
#[derive(Clone, Debug, Serialize)]
pub(super) struct KeyMedia {
    kind: &'static str,
    key: String,
    /// The number of times that it was logged.
    of: usize,
    items: Vec<MediaItem>,
}

#[derive(Clone, Debug, Serialize)]
struct MediaItem {
    s: u64,
    #[serde(flatten)]
    content: ItemContent,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum ItemContent {
    Text {
        text: String,
    },
    Histogram {
        bins: Vec<[Number; 3]>,
    },
    Image {
        /// `None` if the file is missing.
        src: Option<String>,
        width: u32,
        height: u32,
    },
    Plot {
        x: String,
        y: String,
        points: Vec<[Number; 2]>,
    },
}

/// Returns media by key, in the order in which keys first occur; of a key that was logged at many steps, some of them,
/// including the first and the last.
pub(super) fn media_by_key(run: &RunHistory) -> Vec<KeyMedia> {
    let mut by_key: Vec<(&'static str, &str, Vec<&Media>)> = Vec::new();
    for media in &run.media {
        let kind = kind(&media.content);
        match by_key
            .iter_mut()
            .find(|(its, key, _)| *its == kind && *key == media.key)
        {
            Some((_, _, all)) => all.push(media),
            None => by_key.push((kind, &media.key, vec![media])),
        }
    }
    let mut budget = IMAGE_BYTES;
    let of_key = |(kind, key, mut all): (&'static str, &str, Vec<&Media>)| {
        all.sort_by_key(|media| media.step);
        let most = if kind == "image" { IMAGES } else { ITEMS };
        let items = spread(all.len(), most).map(|at| MediaItem {
            s: all[at].step,
            content: content(run, &all[at].content, &mut budget),
        });
        KeyMedia {
            kind,
            key: key.to_owned(),
            of: all.len(),
            items: items.collect(),
        }
    };
    by_key.into_iter().map(of_key).collect()
}

/// The bytes of an image in a run's folder, if the file is one that a run writes.
fn read_image(file: &Path) -> Option<Vec<u8>> {
    let name = file.file_name()?.to_str()?;
    let is_hash = !name.is_empty() && name.bytes().all(|x| x.is_ascii_hexdigit());
    if !is_hash || file.parent()?.file_name()? != "blobs" {
        return None;
    }
    let mut bytes = Vec::new();
    let file = File::open(file).ok()?;
    file.take(LARGEST_IMAGE + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= LARGEST_IMAGE).then_some(bytes)
}

/// `image/png` or `image/jpeg`, by the first bytes.
fn image_type(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => Some("image/png"),
        [0xff, 0xd8, ..] => Some("image/jpeg"),
        _ => None,
    }
}

/// Steps of a key that a page shows.
const ITEMS: usize = 40;
const IMAGES: usize = 24;
/// All images of a run in a page.
const IMAGE_BYTES: usize = 32 << 20;
const LARGEST_IMAGE: u64 = 16 << 20;

fn kind(content: &MediaContent) -> &'static str {
    match content {
        MediaContent::Text(_) => "text",
        MediaContent::Histogram(_) => "histogram",
        MediaContent::Image { .. } => "image",
        MediaContent::Plot { .. } => "plot",
    }
}

fn content(run: &RunHistory, content: &MediaContent, budget: &mut usize) -> ItemContent {
    match content {
        MediaContent::Text(text) => ItemContent::Text { text: text.clone() },
        MediaContent::Histogram(bins) => ItemContent::Histogram {
            bins: bins.iter().map(|bin| bin.map(Number)).collect(),
        },
        MediaContent::Plot {
            x_label,
            y_label,
            points,
        } => ItemContent::Plot {
            x: x_label.clone(),
            y: y_label.clone(),
            points: points.iter().map(|point| point.map(Number)).collect(),
        },
        MediaContent::Image {
            file,
            width,
            height,
            ..
        } => ItemContent::Image {
            src: inline(&run.folder, file, budget),
            width: *width,
            height: *height,
        },
    }
}

fn inline(folder: &Path, file: &Path, budget: &mut usize) -> Option<String> {
    if !file.starts_with(folder) {
        return None;
    }
    let bytes = read_image(file)?;
    *budget = budget.checked_sub(bytes.len())?;
    let mime = image_type(&bytes)?;
    Some(format!("data:{mime};base64,{}", STANDARD.encode(bytes)))
}

/// `most` of `count` numbers at equal distances, with the first and the last.
fn spread(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let shown = count.min(most);
    (0..shown).map(move |at| match shown {
        1 => count - 1,
        _ => at * (count - 1) / (shown - 1),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_many_with_both_ends() {
        assert_eq!(spread(3, 5).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(spread(0, 5).count(), 0);
        assert_eq!(spread(9, 1).collect::<Vec<_>>(), [8]);
        assert_eq!(spread(101, 3).collect::<Vec<_>>(), [0, 50, 100]);
    }

    #[test]
    fn no_other_file_is_an_image() {
        let folder = tempfile::tempdir().unwrap();
        let blobs = folder.path().join("blobs");
        std::fs::create_dir(&blobs).unwrap();
        std::fs::write(blobs.join("ab12"), b"\x89PNG").unwrap();
        std::fs::write(folder.path().join("secret"), b"x").unwrap();
        assert_eq!(read_image(&blobs.join("ab12")).unwrap(), b"\x89PNG");
        assert_eq!(read_image(&blobs.join("../secret")), None);
        assert_eq!(read_image(&folder.path().join("ab12")), None);
        assert_eq!(
            image_type(b"<svg>"),
            None,
            "a script's type is never claimed"
        );
    }
}
