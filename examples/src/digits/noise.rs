/// A small random stream that is the same on every machine for the same key: SplitMix64 (Steele, Lea and Flood, "Fast
/// splittable pseudorandom number generators", 2014).
pub(super) struct Noise(u64);

impl Noise {
    /// Creates the stream of a key. Keys that differ in any number give unrelated streams.
    pub(super) fn new(key: [u64; 3]) -> Self {
        let mut stream = Self(0);
        for part in key {
            stream.0 = stream.next() ^ part;
        }
        stream
    }

    /// Draws a whole number below `bound`, which must not be 0. The bias is below `bound / 2^64`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        let wide = u128::from(self.next()) * bound as u128;
        (wide >> 64) as usize
    }

    /// Draws a number between `low` and `high`, uniformly.
    pub(super) fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Draws a number around 0 with standard deviation 1, never beyond 3.5: the sum of four uniform numbers, which is
    /// cheap and close enough to normal here.
    pub(super) fn normal(&mut self) -> f32 {
        let sum = self.unit() + self.unit() + self.unit() + self.unit();
        (sum - 2.0) * 3f32.sqrt()
    }

    /// Draws a number in `[0, 1)`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_streams_have_the_moments_they_promise() {
        let mut noise = Noise::new([1, 2, 3]);
        let count = 20_000;
        let normal: Vec<f32> = (0..count).map(|_| noise.normal()).collect();
        let mean = normal.iter().sum::<f32>() / count as f32;
        let square = normal.iter().map(|x| x * x).sum::<f32>() / count as f32;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((square - 1.0).abs() < 0.05, "{square}");

        let mut seen = [0usize; 7];
        (0..count).for_each(|_| seen[noise.below(7)] += 1);
        assert!(
            seen.iter().all(|&n| n.abs_diff(count / 7) < 300),
            "{seen:?}"
        );
    }

    #[test]
    fn every_part_of_the_key_matters() {
        let first = |key| Noise::new(key).next();
        let all = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]].map(first);
        let distinct: std::collections::HashSet<_> = all.into_iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(first([4, 5, 6]), first([4, 5, 6]));
    }
}
