//! Logs texts, histograms, images and plots.

use super::Run;
use crate::error::{Error, Kind, Result};
use crate::record::{Number, Record};
use crate::run_files::write_blob;

/// The distribution of values.
///
/// ```
/// use accelerator_track::Histogram;
///
/// let histogram = Histogram::of([0.0, 0.1, 0.9, 1.0].into_iter(), 2);
/// assert_eq!(histogram.bins(), [[0.0, 0.5, 2.0], [0.5, 1.0, 2.0]]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    bins: Vec<[f64; 3]>,
}

impl Histogram {
    /// Counts values in bins of equal width, from the least to the greatest. Values that are not finite are left out;
    /// if all are equal, there is one bin.
    #[must_use]
    pub fn of(values: impl Iterator<Item = f64> + Clone, bins: usize) -> Self {
        let finite = values.filter(|x| x.is_finite());
        let (least, greatest) = finite
            .clone()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| {
                (a.min(x), b.max(x))
            });
        if least > greatest {
            return Self { bins: Vec::new() };
        }
        let bins = if least == greatest { 1 } else { bins.max(1) };
        let width = (greatest - least) / bins as f64;
        let edge = |at: usize| match at {
            at if at == bins => greatest,
            at => least + width * at as f64,
        };
        let mut counts = vec![0.0; bins];
        for value in finite {
            let at = ((value - least) / width) as usize;
            counts[at.min(bins - 1)] += 1.0;
        }
        let bins = counts.into_iter().enumerate();
        Self {
            bins: bins
                .map(|(at, count)| [edge(at), edge(at + 1), count])
                .collect(),
        }
    }

    /// Left edge, right edge and count of each bin.
    #[must_use]
    pub fn bins(&self) -> &[[f64; 3]] {
        &self.bins
    }
}

impl Run {
    /// Logs a text, as Markdown.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = accelerator_track::Run::builder("a").runs_folder(temporary.path()).start()?;
    /// run.log_text("sample/poem", "To **be**", 100);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_text(&self, key: &str, text: &str, step: u64) {
        self.record(Record::Text {
            key: key.to_owned(),
            step,
            text: text.to_owned(),
        });
    }

    /// Logs a histogram, as of a parameter or its gradient.
    ///
    /// ```
    /// use accelerator_track::{Histogram, Run};
    ///
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = Run::builder("a").runs_folder(temporary.path()).start()?;
    /// let weights = [0.1f32, -0.2, 0.3];
    /// run.log_histogram("weights/conv1", &Histogram::of(weights.iter().map(|&x| x.into()), 30), 100);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_histogram(&self, key: &str, histogram: &Histogram, step: u64) {
        let bins = histogram.bins.iter().map(|bin| bin.map(Number));
        self.record(Record::Histogram {
            key: key.to_owned(),
            step,
            bins: bins.collect(),
        });
    }

    /// Logs a curve of one step, x and y of its points.
    ///
    /// ```
    /// # let temporary = tempfile::tempdir().unwrap();
    /// let run = accelerator_track::Run::builder("a").runs_folder(temporary.path()).start()?;
    /// run.log_plot("test/precision", ["recall", "precision"], [[0.0, 1.0], [0.5, 0.9], [1.0, 0.4]], 938);
    /// # Ok::<(), accelerator_track::Error>(())
    /// ```
    pub fn log_plot(
        &self,
        key: &str,
        [x_label, y_label]: [&str; 2],
        points: impl IntoIterator<Item = [f64; 2]>,
        step: u64,
    ) {
        let points = points.into_iter().map(|point| point.map(Number));
        self.record(Record::Plot {
            key: key.to_owned(),
            step,
            x_label: x_label.to_owned(),
            y_label: y_label.to_owned(),
            points: points.collect(),
        });
    }

    /// Logs an image: the bytes of a PNG or JPEG file. They are written to the run's folder before it returns.
    ///
    /// # Errors
    ///
    /// If they are not such an image, or the disk refuses them.
    ///
    /// ```no_run
    /// # fn f(run: &accelerator_track::Run) -> accelerator_track::Result<()> {
    /// run.log_image("samples/digits", &std::fs::read("digits.png").unwrap(), 100)
    /// # }
    /// ```
    pub fn log_image(&self, key: &str, image: &[u8], step: u64) -> Result<()> {
        let Some((mime, width, height)) = image_size(image) else {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "the image {key:?} of step {step} is neither PNG nor JPEG: expected the bytes of such a file, found {} \
                     bytes that begin with {:02x?}",
                    image.len(),
                    &image[..image.len().min(4)]
                ),
            ));
        };
        let hash = write_blob(&self.folder, image)?;
        self.record(Record::Image {
            key: key.to_owned(),
            step,
            hash,
            mime: mime.to_owned(),
            width,
            height,
        });
        Ok(())
    }
}

/// The type of an image and its width and height, from its header.
fn image_size(image: &[u8]) -> Option<(&'static str, u32, u32)> {
    if image.starts_with(b"\x89PNG\r\n\x1a\n") {
        let at = |from: usize| {
            Some(u32::from_be_bytes(
                image.get(from..from + 4)?.try_into().ok()?,
            ))
        };
        return Some(("image/png", at(16)?, at(20)?));
    }
    let mut rest = image.strip_prefix(&[0xff, 0xd8])?;
    // Segments: a marker, the length of what follows. That of the frame has the size.
    loop {
        let &[0xff, marker, high, low, ..] = rest else {
            return None;
        };
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            let at = |from: usize| {
                Some(u32::from(u16::from_be_bytes(
                    rest.get(from..from + 2)?.try_into().ok()?,
                )))
            };
            return Some(("image/jpeg", at(7)?, at(5)?));
        }
        rest = rest.get(2 + usize::from(u16::from_be_bytes([high, low]))..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_images_is_read_from_their_headers() {
        let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        png.extend([0, 0, 0, 28, 0, 0, 1, 0]);
        assert_eq!(image_size(&png), Some(("image/png", 28, 256)));
        assert_eq!(image_size(&png[..20]), None);
        let jpeg = [
            0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2, 0xff, 0xc0, 0, 17, 8, 0, 20, 0, 30, 3,
        ];
        assert_eq!(image_size(&jpeg), Some(("image/jpeg", 30, 20)));
        assert_eq!(image_size(b"GIF89a"), None);
        assert_eq!(image_size(b""), None);
    }

    #[test]
    fn histograms_of_odd_values() {
        assert!(Histogram::of([f64::NAN].into_iter(), 3).bins().is_empty());
        assert_eq!(
            Histogram::of([2.0, 2.0].into_iter(), 3).bins(),
            [[2.0, 2.0, 2.0]]
        );
        let histogram = Histogram::of([1.0, f64::INFINITY, 3.0].into_iter(), 2);
        assert_eq!(histogram.bins(), [[1.0, 2.0, 1.0], [2.0, 3.0, 1.0]]);
    }
}
