"""Sets Django up when it is imported: in the child processes of a worker whose own process has set it up.

`fairlane.integrations.django.install` names this module; nothing else imports it.
"""

import django

django.setup()
