/// Draws that follow from a seed and names: SplitMix64 (Steele, Lea and Flood 2014), begun at a hash of them.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates the draws that follow from the seed and the names in `parts`.
    pub(crate) fn of(seed: u64, parts: &[&[u8]]) -> Self {
        let mut random = Self(seed);
        for part in parts {
            random.fold(part.len() as u64);
            for bytes in part.chunks(8) {
                let mut word = [0; 8];
                word[..bytes.len()].copy_from_slice(bytes);
                random.fold(u64::from_le_bytes(word));
            }
        }
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number from 0 to below 1.
    pub(crate) fn unit(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits")]
        let bits = (self.next() >> 11) as f64;
        bits / 9_007_199_254_740_992.0
    }

    /// Draws a number from 0 to below `bound`, which is not 0: Lemire's multiplication without its rejection, whose
    /// bias is below 2⁻³² for bounds below 2³².
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// Draws from the standard normal distribution (Box and Muller 1958).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.unit()));
        radius * libm::cos(2.0 * std::f64::consts::PI * self.unit())
    }

    fn fold(&mut self, word: u64) {
        self.0 ^= word;
        self.0 = self.next();
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
