"""The reports, read from the ledger and the samples: usage, fairness, and series for plots.

Times are seconds; device_seconds = device_us / 1e6. Each report reads within one transaction, with a fixed number of
statements.
"""

from tenants.fairness import fairness_report as fairness_report
from tenants.fairness import min_to_max as min_to_max
from tenants.fairness import weighted_jain as weighted_jain
from tenants.ledger_queries import OUTCOMES as OUTCOMES
from tenants.series import service_series as service_series
from tenants.usage import DIMENSIONS as DIMENSIONS
from tenants.usage import check_dimensions as check_dimensions
from tenants.usage import usage_report as usage_report
