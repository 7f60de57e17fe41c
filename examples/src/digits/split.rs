use std::path::{Path, PathBuf};

use super::{Digits, PIXELS, idx};
use crate::error::{Error, Kind, Result};

/// The number of samples to draw for training, if it is not given.
const DRAWN_TRAIN: usize = 3200;

/// The number of samples to draw for validation.
const DRAWN_VALIDATION: usize = 500;

/// The number of samples to draw for the test.
const DRAWN_TEST: usize = 1000;

/// Three disjoint sets of digits.
#[derive(Clone, Debug)]
pub struct Split {
    /// The samples to train on.
    pub train: Digits,
    /// The samples to validate on after each epoch.
    pub validation: Digits,
    /// The samples to test on at the end.
    pub test: Digits,
}

impl Split {
    /// Reads a folder as [`load`](Self::load) does, or draws digits if there is none. At most `limit` samples are for
    /// training; without a limit, 3200 are drawn.
    ///
    /// # Errors
    ///
    /// The errors of [`load`](Self::load).
    pub fn open(dir: Option<&Path>, limit: Option<usize>) -> Result<Self> {
        match dir {
            Some(dir) => Ok(Self::load(dir)?.limit(limit.unwrap_or(usize::MAX))),
            None => Ok(Self::draw(limit.unwrap_or(DRAWN_TRAIN))),
        }
    }

    /// Draws `train` samples for training, 500 for validation and 1000 for the test; see [`Digits::draw`]. Validation
    /// and test are the same for every `train`.
    pub fn draw(train: usize) -> Self {
        Self {
            train: Digits::draw(train, 1),
            validation: Digits::draw(DRAWN_VALIDATION, 2),
            test: Digits::draw(DRAWN_TEST, 3),
        }
    }

    /// Reads a folder with files in the format and under the names of MNIST (which Fashion-MNIST, KMNIST and others use
    /// too): `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    /// `t10k-labels-idx1-ubyte`, each plain or with `.gz`. A dot may replace the hyphen before `idx`.
    ///
    /// With both pairs, `t10k` is the test set, and every twelfth sample of `train` is for validation (of 60,000
    /// samples: 55,000 and 5,000). A single pair is split: of every ten successive samples, eight are for training, the
    /// ninth for validation and the tenth for the test (of 10,000 samples: 8,000, 1,000 and 1,000).
    ///
    /// # Errors
    ///
    /// [`Error::is_data`] or [`Error::is_io`]; the message names the file, what it contains and what was expected.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            return Err(Error::new(
                Kind::Data,
                format!(
                    "the data folder `{}` is not there, or is not a folder; give the folder that \
                     holds the MNIST files, or none to train on drawn digits",
                    dir.display()
                ),
            ));
        }
        match (pair(dir, "train")?, pair(dir, "t10k")?) {
            (Some(train), Some(test)) => {
                let [train, validation, _] = deal(dir, &train, 12, 11, None)?;
                Ok(Self {
                    train,
                    validation,
                    test,
                })
            }
            (Some(only), None) | (None, Some(only)) => {
                let [train, validation, test] = deal(dir, &only, 10, 8, Some(9))?;
                Ok(Self {
                    train,
                    validation,
                    test,
                })
            }
            (None, None) => Err(Error::new(
                Kind::Data,
                format!(
                    "the data folder `{}` has neither `train-images-idx3-ubyte` nor \
                     `t10k-images-idx3-ubyte` (plain or `.gz`); put the MNIST files there, or \
                     give no folder to train on drawn digits",
                    dir.display()
                ),
            )),
        }
    }

    /// Returns the same sets with at most `count` samples for training.
    #[must_use]
    pub fn limit(mut self, count: usize) -> Self {
        self.train = self.train.limit(count);
        self
    }
}

/// Reads the images and labels of one part; `None` if neither file exists.
fn pair(dir: &Path, part: &str) -> Result<Option<Digits>> {
    let images = find(dir, part, "images", "idx3");
    let labels = find(dir, part, "labels", "idx1");
    let (images, labels) = match (images, labels) {
        (Some(images), Some(labels)) => (images, labels),
        (None, None) => return Ok(None),
        (Some(found), None) => {
            return Err(alone(dir, &found, &format!("{part}-labels-idx1-ubyte")));
        }
        (None, Some(found)) => {
            return Err(alone(dir, &found, &format!("{part}-images-idx3-ubyte")));
        }
    };
    let (pixels, digits) = (idx::images(&images)?, idx::labels(&labels)?);
    if pixels.len() / PIXELS != digits.len() {
        return Err(Error::new(
            Kind::Data,
            format!(
                "`{}` holds {} images, but `{}` holds {} labels; they must come from the same set",
                images.display(),
                pixels.len() / PIXELS,
                labels.display(),
                digits.len()
            ),
        ));
    }
    Ok(Some(Digits::new(pixels, digits)))
}

/// Returns the first of the file's possible names that exists.
fn find(dir: &Path, part: &str, what: &str, format: &str) -> Option<PathBuf> {
    ["-", "."]
        .into_iter()
        .flat_map(|joint| ["", ".gz"].map(|end| format!("{part}-{what}{joint}{format}-ubyte{end}")))
        .map(|name| dir.join(name))
        .find(|path| path.is_file())
}

fn alone(dir: &Path, found: &Path, missing: &str) -> Error {
    Error::new(
        Kind::Data,
        format!(
            "`{}` is there, but `{missing}` (plain or `.gz`) is not in `{}`; images and labels \
             come in pairs, so put it there too",
            found.display(),
            dir.display()
        ),
    )
}

/// Deals samples out in rounds of `round`: the sample at `validation` of each round to the second set, the one at
/// `test`, if given, to the third, and the others to the first. Neighbours in a file are often alike (MNIST's second
/// half is harder than its first), so each set gets samples from everywhere.
fn deal(
    dir: &Path,
    all: &Digits,
    round: usize,
    validation: usize,
    test: Option<usize>,
) -> Result<[Digits; 3]> {
    if all.count() < round {
        return Err(Error::new(
            Kind::Data,
            format!(
                "the files in `{}` hold {} samples; at least {round} are needed for training, \
                 validation and test",
                dir.display(),
                all.count()
            ),
        ));
    }
    let mut parts: [(Vec<u8>, Vec<u8>); 3] = Default::default();
    for (index, &label) in all.labels().iter().enumerate() {
        let place = index % round;
        let part = if place == validation {
            1
        } else if Some(place) == test {
            2
        } else {
            0
        };
        parts[part].0.extend_from_slice(all.image(index));
        parts[part].1.push(label);
    }
    Ok(parts.map(|(images, labels)| Digits::new(images, labels)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::idx::tests::{image_file, label_file};
    use super::*;

    fn write(dir: &Path, part: &str, count: usize) {
        let digits = Digits::draw(count, 9);
        fs::write(
            dir.join(format!("{part}-images-idx3-ubyte")),
            image_file(&digits),
        )
        .unwrap();
        fs::write(
            dir.join(format!("{part}-labels-idx1-ubyte")),
            label_file(&digits),
        )
        .unwrap();
    }

    fn counts(split: &Split) -> [usize; 3] {
        [&split.train, &split.validation, &split.test].map(Digits::count)
    }

    #[test]
    fn a_single_pair_is_dealt_into_three_parts() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "t10k", 205);
        let split = Split::load(dir.path()).unwrap();
        assert_eq!(counts(&split), [165, 20, 20]);
        let all = Digits::draw(205, 9);
        assert_eq!(split.train.image(8), all.image(10));
        assert_eq!(split.validation.image(1), all.image(18));
        assert_eq!(split.test.image(1), all.image(19));
        assert_eq!(split.test.labels()[1], all.labels()[19]);
        assert_eq!(counts(&split.limit(64)), [64, 20, 20]);
    }

    #[test]
    fn two_pairs_keep_the_test_set_whole() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "train", 240);
        write(dir.path(), "t10k", 30);
        assert_eq!(counts(&Split::load(dir.path()).unwrap()), [220, 20, 30]);
    }

    #[test]
    fn dotted_names_are_known_too() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "t10k", 20);
        for name in ["images-idx3", "labels-idx1"] {
            let from = dir.path().join(format!("t10k-{name}-ubyte"));
            let to = dir
                .path()
                .join(format!("t10k-{}-ubyte", name.replace('-', ".")));
            fs::rename(from, to).unwrap();
        }
        assert_eq!(counts(&Split::load(dir.path()).unwrap()), [16, 2, 2]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let absent = Split::load(dir.path().join("nowhere")).unwrap_err();
        assert!(
            absent.is_data() && absent.to_string().contains("nowhere"),
            "{absent}"
        );
        let empty = Split::load(dir.path()).unwrap_err();
        assert!(
            empty.is_data() && empty.to_string().contains("t10k-images"),
            "{empty}"
        );

        write(dir.path(), "t10k", 20);
        fs::remove_file(dir.path().join("t10k-labels-idx1-ubyte")).unwrap();
        let half = Split::load(dir.path()).unwrap_err();
        assert!(half.is_data(), "{half}");
        assert!(
            half.to_string().contains("`t10k-labels-idx1-ubyte`"),
            "{half}"
        );
    }

    #[test]
    fn images_and_labels_that_differ_in_number_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "t10k", 20);
        let labels = label_file(&Digits::draw(19, 9));
        fs::write(dir.path().join("t10k-labels-idx1-ubyte"), labels).unwrap();
        let error = Split::load(dir.path()).unwrap_err();
        assert!(error.is_data(), "{error}");
        assert!(error.to_string().contains("20 images"), "{error}");
        assert!(error.to_string().contains("19 labels"), "{error}");
    }

    #[test]
    fn too_few_samples_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "t10k", 9);
        assert!(Split::load(dir.path()).unwrap_err().is_data());
    }

    #[test]
    fn drawn_parts_differ_and_the_last_two_do_not_depend_on_the_first() {
        let (small, large) = (Split::draw(30), Split::draw(60));
        assert_eq!(counts(&small), [30, 500, 1000]);
        assert_eq!(counts(&large), [60, 500, 1000]);
        assert_eq!(small.test.image(7), large.test.image(7));
        assert_ne!(small.train.image(0), small.validation.image(0));
        assert_ne!(small.validation.image(0), small.test.image(0));
    }
}
