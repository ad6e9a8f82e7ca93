//! The ideal that fair share is compared with: max-min fairness.

use crate::run_metrics::TenantMetrics;

/// Tokens that each tenant would have been served. Nobody gets more than it asked for; what is left is
/// divided equally among the others.
pub(crate) fn fair_shares<'a>(
    tenants: impl Iterator<Item = &'a TenantMetrics> + Clone,
) -> Vec<u64> {
    let asked: Vec<u64> = tenants.clone().map(|it| it.num_asked_tokens).collect();
    let served = tenants.map(|it| it.num_served_tokens).sum();
    max_min(&asked, served)
}

fn max_min(asked: &[u64], capacity: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..asked.len()).collect();
    order.sort_unstable_by_key(|index| asked[*index]);
    let mut shares = vec![0; asked.len()];
    let mut left = capacity;
    for (done, index) in order.into_iter().enumerate() {
        let level = left / (asked.len() - done) as u64;
        shares[index] = asked[index].min(level);
        left -= shares[index];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::max_min;

    #[test]
    fn what_one_tenant_does_not_ask_for_goes_to_the_others() {
        assert_eq!(max_min(&[100, 10, 100], 110), [50, 10, 50]);
    }

    #[test]
    fn nobody_gets_more_than_it_asked_for() {
        assert_eq!(max_min(&[5, 7], 100), [5, 7]);
    }
}
