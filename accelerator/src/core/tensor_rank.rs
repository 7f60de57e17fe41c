/// Runs `$body` with `$D` bound to the rank of a tensor that is known at run time only. Burn's
/// containers of gradients want the rank as a constant, and panic on a wrong one.
macro_rules! with_rank {
    ($rank:expr, $D:ident => $body:expr) => {
        match $rank {
            0 | 1 => {
                const $D: usize = 1;
                $body
            }
            2 => {
                const $D: usize = 2;
                $body
            }
            3 => {
                const $D: usize = 3;
                $body
            }
            4 => {
                const $D: usize = 4;
                $body
            }
            5 => {
                const $D: usize = 5;
                $body
            }
            6 => {
                const $D: usize = 6;
                $body
            }
            7 => {
                const $D: usize = 7;
                $body
            }
            _ => {
                const $D: usize = 8;
                $body
            }
        }
    };
}

pub(crate) use with_rank;
