use super::glyph::{GLYPHS, Stroke};
use super::noise::Noise;
use super::{CLASSES, PIXELS, SIDE};

/// The random streams of labels and images: separate, so that labels do not depend on the images.
const LABELS: u64 = 0;
const IMAGES: u64 = 1;

/// Draws the image and the label of sample `index` of the set with this `seed`.
pub(super) fn digit(seed: u64, index: usize) -> ([u8; PIXELS], u8) {
    let label = label(seed, index);
    let mut noise = Noise::new([seed, IMAGES, index as u64]);
    let styles = GLYPHS[usize::from(label)];
    let glyph = styles[noise.below(styles.len())];
    let pen = Pen::pick(&mut noise);

    let mut ink = [0f32; PIXELS];
    for stroke in glyph {
        let path = pen.place(&flatten(stroke, &mut noise));
        for ends in path.windows(2) {
            pen.mark(&mut ink, ends[0], ends[1]);
        }
    }
    (expose(&ink, pen.strength, &mut noise), label)
}

/// Returns a label; every block of ten samples holds the ten digits, shuffled block by block.
fn label(seed: u64, index: usize) -> u8 {
    let block = (index / CLASSES) as u64;
    let mut noise = Noise::new([seed, LABELS, block]);
    let mut order: [u8; CLASSES] = core::array::from_fn(|digit| digit as u8);
    for last in (1..CLASSES).rev() {
        order.swap(last, noise.below(last + 1));
    }
    order[index % CLASSES]
}

/// Moves each point of a stroke a little, and returns the stroke as a chain of short straight lines.
fn flatten(stroke: &Stroke, noise: &mut Noise) -> Vec<(f32, f32)> {
    const JITTER: f32 = 0.035;
    let mut jittered = |points: &[(f32, f32)]| -> Vec<(f32, f32)> {
        points
            .iter()
            .map(|&(x, y)| (x + JITTER * noise.normal(), y + JITTER * noise.normal()))
            .collect()
    };
    match stroke {
        Stroke::Line(points) => jittered(points),
        Stroke::Curve(points) => smooth(&jittered(points)),
    }
}

/// Lays a Catmull-Rom spline through the points (Catmull and Rom, "A class of local interpolating splines", 1974); the
/// end points count twice.
fn smooth(points: &[(f32, f32)]) -> Vec<(f32, f32)> {
    const PIECES: usize = 6;
    let Some((&first, &last)) = points.first().zip(points.last()) else {
        return Vec::new();
    };
    let mut path = vec![first];
    for from in 0..points.len() - 1 {
        let before = points[from.saturating_sub(1)];
        let (start, end) = (points[from], points[from + 1]);
        let after = points.get(from + 2).copied().unwrap_or(last);
        for piece in 1..=PIECES {
            let t = piece as f32 / PIECES as f32;
            let along = |p0: f32, p1: f32, p2: f32, p3: f32| {
                let linear = (p2 - p0) * t;
                let square = (2.0 * p0 - 5.0 * p1 + 4.0 * p2 - p3) * t * t;
                let cube = (3.0 * p1 - p0 - 3.0 * p2 + p3) * t * t * t;
                p1 + 0.5 * (linear + square + cube)
            };
            path.push((
                along(before.0, start.0, end.0, after.0),
                along(before.1, start.1, end.1, after.1),
            ));
        }
    }
    path
}

/// The way one image is written: position, size, slant, thickness and darkness.
struct Pen {
    /// Maps box coordinates, relative to the centre of the box, to pixel coordinates: `x = m[0]·u + m[1]·v`,
    /// `y = m[2]·u + m[3]·v`.
    matrix: [f32; 4],
    centre: (f32, f32),
    radius: f32,
    strength: f32,
}

impl Pen {
    fn pick(noise: &mut Noise) -> Self {
        let (width, height) = (noise.between(9.5, 15.0), noise.between(15.0, 20.5));
        let (sin, cos) = noise.between(-0.3, 0.3).sin_cos();
        let shear = noise.between(-0.3, 0.3);
        let middle = SIDE as f32 / 2.0;
        Self {
            // Scale first, then shear, then rotate.
            matrix: [
                cos * width,
                (cos * shear - sin) * height,
                sin * width,
                (sin * shear + cos) * height,
            ],
            centre: (
                middle + noise.between(-3.0, 3.0),
                middle + noise.between(-3.0, 3.0),
            ),
            radius: noise.between(0.6, 1.6),
            strength: noise.between(0.65, 1.0),
        }
    }

    fn place(&self, path: &[(f32, f32)]) -> Vec<(f32, f32)> {
        let m = self.matrix;
        path.iter()
            .map(|&(x, y)| (x - 0.5, y - 0.5))
            .map(|(u, v)| {
                (
                    self.centre.0 + m[0] * u + m[1] * v,
                    self.centre.1 + m[2] * u + m[3] * v,
                )
            })
            .collect()
    }

    /// Draws a straight line of ink. It covers a pixel by the distance from the pixel's centre to the edge of the line
    /// beyond it, from 0 to 1; crossing lines do not add up.
    fn mark(&self, ink: &mut [f32; PIXELS], start: (f32, f32), end: (f32, f32)) {
        let reach = self.radius + 0.5;
        let columns = covered(start.0, end.0, reach);
        for row in covered(start.1, end.1, reach) {
            for column in columns.clone() {
                let pixel = (column as f32 + 0.5, row as f32 + 0.5);
                let cover = (reach - distance(pixel, start, end)).clamp(0.0, 1.0);
                let cell = &mut ink[row * SIDE + column];
                *cell = cell.max(cover);
            }
        }
    }
}

/// Returns the rows (or columns) of pixels that a line between two coordinates can touch.
fn covered(start: f32, end: f32, reach: f32) -> core::ops::Range<usize> {
    let side = SIDE as f32;
    let first = (start.min(end) - reach).floor().clamp(0.0, side);
    let past = (start.max(end) + reach).ceil().clamp(0.0, side);
    first as usize..past as usize
}

/// Returns the distance of a point from a line segment.
fn distance(point: (f32, f32), start: (f32, f32), end: (f32, f32)) -> f32 {
    let along = (end.0 - start.0, end.1 - start.1);
    let off = (point.0 - start.0, point.1 - start.1);
    let square = along.0 * along.0 + along.1 * along.1;
    let part = if square > 0.0 {
        ((off.0 * along.0 + off.1 * along.1) / square).clamp(0.0, 1.0)
    } else {
        0.0
    };
    let (x, y) = (off.0 - part * along.0, off.1 - part * along.1);
    (x * x + y * y).sqrt()
}

/// Turns ink into grey values, with grain everywhere and a few specks.
fn expose(ink: &[f32; PIXELS], strength: f32, noise: &mut Noise) -> [u8; PIXELS] {
    let grain = noise.between(0.02, 0.12);
    let mut grey = ink.map(|cover| cover * strength + grain * noise.normal());
    for _ in 0..noise.below(8) {
        grey[noise.below(PIXELS)] += noise.between(0.3, 0.9);
    }
    // `as` saturates: grain below the ground becomes 0, and grain above full ink 255.
    grey.map(|value| (value * 255.0).round() as u8)
}

#[cfg(test)]
mod tests {
    use super::super::{Digits, PIXELS};
    use super::*;

    #[test]
    fn an_image_depends_on_seed_and_index_only() {
        assert_eq!(digit(3, 17), digit(3, 17));
        assert_ne!(digit(3, 17), digit(4, 17));
        assert_ne!(digit(3, 17), digit(3, 18));
        let (short, long) = (Digits::draw(20, 3), Digits::draw(40, 3));
        assert!((0..20).all(|i| short.image(i) == long.image(i)));
        assert_eq!(short.image(17), &digit(3, 17).0);
    }

    #[test]
    fn labels_are_balanced_and_in_changing_order() {
        let digits = Digits::draw(200, 11);
        let blocks: Vec<&[u8]> = digits.labels().chunks(10).collect();
        for block in &blocks {
            let mut sorted = block.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        }
        assert!(blocks.windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn every_image_has_ink_and_ground() {
        let digits = Digits::draw(500, 5);
        for index in 0..500 {
            let dark = digits.image(index).iter().filter(|&&v| v > 128).count();
            assert!(
                (10..PIXELS / 2).contains(&dark),
                "image {index}: {dark} dark pixels"
            );
        }
    }

    /// A linear classifier (the nearest class mean) does better than chance and far worse than a trained network, so
    /// there is something to learn.
    #[test]
    fn the_digits_are_neither_trivial_nor_noise() {
        let (train, test) = (Digits::draw(2000, 1), Digits::draw(1000, 2));
        let mut means = vec![[0f64; PIXELS]; CLASSES];
        for index in 0..2000 {
            let mean = &mut means[usize::from(train.labels()[index])];
            for (sum, &value) in mean.iter_mut().zip(train.image(index)) {
                *sum += f64::from(value) / 200.0;
            }
        }
        let right = (0..1000)
            .filter(|&index| {
                let far = |mean: &[f64; PIXELS]| -> f64 {
                    let image = test.image(index).iter();
                    mean.iter()
                        .zip(image)
                        .map(|(m, &v)| (m - f64::from(v)).powi(2))
                        .sum()
                };
                let near = (0..CLASSES).min_by(|&a, &b| far(&means[a]).total_cmp(&far(&means[b])));
                near == Some(usize::from(test.labels()[index]))
            })
            .count();
        assert!((250..800).contains(&right), "{right} of 1000");
    }
}
