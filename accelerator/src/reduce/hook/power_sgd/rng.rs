/// Random numbers that depend on nothing but a seed, the path of a parameter and a step: every rank draws
/// the same, whatever was drawn before. SplitMix64 (Steele et al. 2014), begun at a hash.
#[derive(Clone, Debug)]
pub(super) struct StepRng {
    state: u64,
}

impl StepRng {
    pub(super) fn new(seed: u64, path: &str, step: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(&step.to_le_bytes());
        hasher.update(path.as_bytes());
        let mut state = [0; 8];
        hasher.finalize_xof().fill(&mut state);
        Self {
            state: u64::from_le_bytes(state),
        }
    }

    /// A number from -1 to 1, uniformly: no function of the mathematical library is in it, whose last bits
    /// may differ between machines.
    pub(super) fn next(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        // 53 bits, which an f64 holds.
        (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}
