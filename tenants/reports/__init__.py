"""The reports, read from the ledger and the samples: usage, fairness, and series for plots.

Times are seconds; device_seconds = device_us / 1e6. Each report reads within one transaction, with a fixed number of
statements.
"""

from tenants.reports.fairness import fairness_report as fairness_report
from tenants.reports.fairness import min_to_max as min_to_max
from tenants.reports.fairness import weighted_jain as weighted_jain
from tenants.reports.queries import OUTCOMES as OUTCOMES
from tenants.reports.series import service_series as service_series
from tenants.reports.usage import DIMENSIONS as DIMENSIONS
from tenants.reports.usage import check_dimensions as check_dimensions
from tenants.reports.usage import usage_report as usage_report
